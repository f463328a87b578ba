"""Why an acceptance figure is not an engine's own: told by records, of which old ones know the text's origin alone."""

from collections.abc import Mapping
from typing import Any

FOREIGN = "the text was not written by the target"


def proxy_of(record: Mapping[str, Any]) -> str:
    """Why the figures of an acceptance record are a proxy, in words; empty if they are exact."""
    reason: str = record.get("proxy", "" if record["own_text"] else FOREIGN)
    return reason
