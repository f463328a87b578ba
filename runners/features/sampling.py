"""How a token is drawn from logits: a temperature, and top-p (nucleus sampling, arXiv 1904.09751)."""

import math

from torch import Tensor


def tempered(logits_RV: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """Logits [..., V] in fp32 at a temperature above 0; -inf for what ``top_p`` leaves out.

    Kept are the likeliest tokens, as few as have ``top_p`` of the probability together, and any as likely as the last
    of them. The softmax of the result is renormalised over those.
    """
    scores_RV = logits_RV.float() / temperature
    if top_p >= 1:
        return scores_RV
    p_RV = scores_RV.softmax(-1)
    falling_RV = p_RV.sort(-1, descending=True).values
    kept_R1 = (falling_RV.cumsum(-1) - falling_RV < top_p).sum(-1, keepdim=True)
    return scores_RV.masked_fill(p_RV < falling_RV.gather(-1, kept_R1 - 1), -math.inf)
