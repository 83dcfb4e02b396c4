from support.troubles import troubles

__all__ = ["troubles"]
