"""The model: plain modules that compute only through tinfer.ops."""
