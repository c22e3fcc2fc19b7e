"""Pictures of masks, layouts, plans and timelines. Each function draws data that its caller has,
and returns the figure.

`Mask.plot`, `Layout.plot` and `canon show` call them, and so do the notebooks. They need
matplotlib; `spans` does not."""
