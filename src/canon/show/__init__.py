"""Pictures of masks, layouts and plans. Each function returns the figure.

`Mask.plot`, `Layout.plot` and `canon show` call them. They need matplotlib."""
