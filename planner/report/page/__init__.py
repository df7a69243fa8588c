"""The HTML page of an explained run.

It needs plotly and Jinja.
"""
