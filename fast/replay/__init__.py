"""Record what a pass launches, and replay it in later calls."""
