"""The OpenPI WebSocket protocol."""
