"""Pictures of masks, layouts, plans and timelines. Each function returns the figure.

`Mask.plot`, `Layout.plot` and `canon show` call them. They need matplotlib; `spans` does not."""
