"""What models stand on: configurations, weights, ranks, attention, and the engine over transformers."""
