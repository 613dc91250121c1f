"""The demo: its model (assets) and its data (orders)."""
