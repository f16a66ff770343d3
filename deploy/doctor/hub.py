"""Rules on Hugging Face, for a model that is not downloaded yet."""

from __future__ import annotations

from deploy.config.runtimes import RUNTIMES
from deploy.doctor.finding import Rule, Verdict, fail, ok, warn
from deploy.doctor.observed import HubSeen, Seen


def _model(seen: Seen) -> Verdict | None:
    hub, plan = seen.hub, seen.plan
    if hub is None or plan is None:
        return None
    name = plan.model.ref
    if hub.cached:
        return ok(f"{name} is in {hub.cache}")
    if hub.offline:
        return fail(
            f"{name} is not in {hub.cache}, and HF_HUB_OFFLINE forbids the download",
            "engines find no weights",
            f"hf download {name} with a network, unset HF_HUB_OFFLINE, or --model FOLDER",
        )
    return _to_fetch(name, hub)


def _to_fetch(name: str, hub: HubSeen) -> Verdict:
    if not hub.asked:
        return ok(f"{name} is not cached yet; up downloads it from Hugging Face")
    if hub.refused:
        return refused(name, hub.trouble)
    if hub.trouble:
        return warn(
            f"{name} is not in {hub.cache}, and {hub.trouble}",
            "engines try again when they start, and exit if that fails",
            f"check the network and HF_ENDPOINT; or hf download {name}, or --model FOLDER",
        )
    return ok(f"{name} is not cached yet; {hub.address} has it")


def refused(name: str, said: str) -> Verdict:
    """Return the verdict on a model that Hugging Face refuses to this user."""
    return fail(
        f"Hugging Face refuses {name}: {said}",
        "engines find no weights",
        "accept its licence on its page, and set HF_TOKEN or hf_token_file; or --model FOLDER",
    )


def _proxies(seen: Seen) -> Verdict | None:
    hub, plan = seen.hub, seen.plan
    if hub is None or plan is None or hub.cached or hub.offline or not hub.proxies:
        return None
    named = ", ".join(hub.proxies)
    if RUNTIMES[plan.runtime].as_user:
        return ok(f"engines download the model through {named}")
    return warn(
        f"{named} is set here but not in the engines' containers",
        "if Hugging Face is reachable only through a proxy, engines exit without weights",
        f"engine: {{env: {{{hub.proxies[0]}: …}}}} in deploy.yaml, or hf download {plan.model.ref}",
    )


RULES = (
    Rule(
        "hub.model", _model,
        looks_at="a Hugging Face model: cached here, or available; `HF_HUB_OFFLINE`",
        fails="it is not cached and downloads are forbidden, or Hugging Face refuses it to you",
        warns="it is not cached and Hugging Face does not answer, or does not know it",
        fix="`hf download MODEL`, `HF_TOKEN`, or `--model FOLDER`",
    ),
    Rule(
        "hub.proxies", _proxies,
        looks_at="proxy variables, if a model must be downloaded",
        warns="engines run in containers, which do not get them",
        fix="`engine.env` in deploy.yaml",
    ),
)  # fmt: skip
