"""LMCache's own Redis client: the one form in which it is supported, and what is refused."""

from __future__ import annotations

from typing import Any

from pdkit_connector.errors import UnsupportedSetting
from pdkit_connector.redis_url import scheme_of
from pdkit_connector.setting import Setting

_SCHEME = "redis"


def require_plain_redis(setting: Setting) -> None:
    """Refuse any use of `remote_url` but whole, uncompressed chunks in one redis:// server.

    Raises:
        UnsupportedSetting: naming LMCache's setting. It shows no more of a URL than its scheme.
    """
    if not (url := setting.lmcache_value("remote_url")):
        return
    scheme, serde = scheme_of(str(url)), setting.lmcache_value("remote_serde")
    asked = (
        ("remote_url", (f"{scheme}://" if scheme else "no scheme") if scheme != _SCHEME else ""),
        ("use_layerwise", _on(setting.lmcache_value("use_layerwise"))),
        ("enable_async_loading", _on(setting.lmcache_value("enable_async_loading"))),
        ("remote_serde", serde if serde not in (None, "naive") else ""),
    )
    for name, value in asked:
        if value:
            raise UnsupportedSetting(
                f"LMCache is set to {name}: {value}, which is not supported with LMCache's own "
                "Redis client. With it, whole chunks go as they are to one redis:// server. "
                f"Way out: leave {name} out of LMCache's configuration, or use the kit's own Redis "
                "client: leave redis.client out of deploy.yaml, then deploy up."
            )


def _on(value: Any) -> str:
    is_on = value.strip().lower() in ("true", "1", "yes", "on") if isinstance(value, str) else value
    return "true" if is_on else ""
