"""Short readable names of candidates, made from what was chosen."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence

from search_spaces.domains import Label

LONGEST = 48

_SHORT = {
    "attention.bias": "bias",
    "attention.norm": "attn",
    "head.norm": "head",
    "inputs.bias": "inbias",
    "inputs.norm": "in",
    "mlp.depth": "mlp",
    "mlp.norm": "mlp",
    "attention": "attn",
    "aux_layers": "",
    "depth": "d",
    "embedding": "emb",
    "feedback": "",
    "fusion": "",
    "fusion_bias": "fbias",
    "head_dim": "hd",
    "heads": "q",
    "hidden_size": "h",
    "intermediate_size": "ff",
    "kv_heads": "kv",
    "projection": "fc",
    "qk_norm": "qk",
    "residual": "res",
    "residual_from": "",
    "stream": "",
    "vocab_size": "v",
    "weights": "head",
    "window": "w",
}


def candidate_name(parameters: Mapping[str, Label], differing: Sequence[str]) -> str:
    """A name of at most ``LONGEST`` characters, equal for equal ``parameters``, such as ``d2-concat-none-2h``.

    ``differing`` are the parameters whose value is not the base's. Where all values do not fit, the name holds those
    and ends in a hash of all.
    """
    name = "-".join(_token(parameter, label) for parameter, label in parameters.items())
    if name and len(name) <= LONGEST:
        return name
    digest = hashlib.sha256(json.dumps(dict(parameters), sort_keys=True).encode()).hexdigest()[:6]
    kept: list[str] = []
    for token in (_token(parameter, parameters[parameter]) for parameter in parameters if parameter in differing):
        if len("-".join([*kept, token, digest])) <= LONGEST:
            kept.append(token)
    return "-".join([*kept, digest])


def _token(parameter: str, label: Label) -> str:
    parts = parameter.split(".")
    initials = "".join(word[:1] for word in parts[-1].split("_"))
    short = _SHORT.get(".".join(parts[-2:]), _SHORT.get(parts[-1], initials))
    if label in ("true", "false"):
        return short if label == "true" else f"no{short}"
    if isinstance(label, int | float):
        return f"{short}{label}" if isinstance(label, int) else f"{short}{label:.3g}"
    word = re.sub(r"[^A-Za-z0-9._]+", "_", label)
    return f"{short}_{word}" if short else word
