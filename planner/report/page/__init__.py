"""The HTML page of an explained run; it needs plotly and Jinja."""
