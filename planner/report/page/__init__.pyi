from .page import (
    save_page as save_page,
)
