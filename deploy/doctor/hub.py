"""Rules on the hub of models, where a model is still to be fetched."""

from __future__ import annotations

from deploy.doctor.finding import Rule, Verdict, ok
from deploy.doctor.seen import HubSeen, Seen


def model(seen: Seen) -> Verdict | None:
    hub, plan = seen.hub, seen.plan
    if hub is None or plan is None:
        return None
    name = plan.model.ref
    if hub.cached:
        return ok(f"{name} is in {hub.cache}")
    if hub.offline:
        return Verdict(
            "fail",
            f"{name} is not in {hub.cache}, and engines are told to leave the hub alone "
            "(HF_HUB_OFFLINE)",
            "engines find no weights",
            f"hf download {name} with a network, unset HF_HUB_OFFLINE, or --model FOLDER",
        )
    return _to_fetch(name, hub)


def _to_fetch(name: str, hub: HubSeen) -> Verdict:
    if not hub.asked:
        return ok(f"{name} is not here yet; up fetches it from the hub")
    if hub.refused:
        return refused(name, hub.trouble)
    if hub.trouble:
        return Verdict(
            "warn",
            f"{name} is not in {hub.cache}, and {hub.trouble}",
            "engines ask again when they start, and end where they get no answer",
            f"see to the network or HF_ENDPOINT; or hf download {name}, or --model FOLDER",
        )
    return ok(f"{name} is not here yet; {hub.address} has it")


def refused(name: str, said: str) -> Verdict:
    """Return what there is to say of a model that the hub does not give to this user."""
    return Verdict(
        "fail",
        f"the hub does not give {name} to you: {said}",
        "engines find no weights",
        "accept its licence on its page, and set HF_TOKEN or hf_token_file; or --model FOLDER",
    )


def proxies(seen: Seen) -> Verdict | None:
    hub, plan = seen.hub, seen.plan
    if hub is None or plan is None or hub.cached or hub.offline or not hub.proxies:
        return None
    named = ", ".join(hub.proxies)
    if plan.runtime != "compose":
        return ok(f"engines fetch the model through {named}")
    return Verdict(
        "warn",
        f"{named} is set here, and the engines' containers do not get it",
        "where the hub is reached by a proxy only, engines end without weights",
        f"engine: {{env: {{{hub.proxies[0]}: …}}}} in deploy.yaml, or hf download {plan.model.ref}",
    )


RULES = (
    Rule(
        "hub.model", model,
        looks_at="a hub's model: in the cache here, or to be had; `HF_HUB_OFFLINE`",
        fails="it is not here and engines may not ask the hub, or the hub refuses it to you",
        warns="it is not here and the hub does not answer, or not with that model",
        fix="`hf download MODEL`, `HF_TOKEN`, or `--model FOLDER`",
    ),
    Rule(
        "hub.proxies", proxies,
        looks_at="variables that name a proxy, where a model is still to be fetched",
        warns="engines are in containers, which do not get them",
        fix="`engine.env` in deploy.yaml",
    ),
)  # fmt: skip
