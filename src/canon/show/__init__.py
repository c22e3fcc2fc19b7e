"""Pictures of masks, layouts and plans.

`Mask.plot`, `Layout.plot` and `canon show` call them. They need matplotlib."""
