"""Record what a pass launches in its first call, and replay it afterwards."""
