"""Old path of `tampu.prometheus`."""

from tampu.prometheus import PrometheusSink

__all__ = ["PrometheusSink"]
