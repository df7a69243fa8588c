"""The HTML page; it needs plotly and Jinja."""
