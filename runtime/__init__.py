"""What models stand on: configurations, weights, ranks, attention, and checks of arguments."""
