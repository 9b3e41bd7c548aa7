"""What models stand on: configurations, weights, ranks, attention, the engine over transformers."""
