"""Where the KV of the user's own prompt came from, and why not from the store."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import computed_field

from deploy.verify.hits import eligible_tokens


@dataclass(frozen=True)
class OwnPrompt:
    """The prompt of `--prompt-file`, sent to a producer and then to a consumer, in tokens.

    Attributes:
        chunk_size: tokens of a chunk.
        producer_local, local: what the engine had in its own prefix cache.
        producer_loaded, loaded: what it loaded from the store; the producer, all of it that was
            sent before.
    """

    producer: str
    consumer: str
    tokens: int
    chunk_size: int
    producer_local: int = 0
    producer_loaded: int = 0
    local: int = 0
    loaded: int = 0

    @property
    def name(self) -> str:
        """The pair, as other results name it."""
        return f"{self.producer} → {self.consumer}"

    @computed_field
    @property
    def chunks(self) -> int:
        """Whole chunks of the prompt."""
        return self.tokens // self.chunk_size

    @computed_field
    @property
    def eligible(self) -> int:
        """Tokens that the store can serve to an engine without them."""
        return eligible_tokens(self.tokens, self.chunk_size)

    @property
    def under_chunk(self) -> bool:
        """Whether the prompt is too short to be stored at all."""
        return not self.eligible

    @property
    def hidden(self) -> bool:
        """The consumer's own prefix cache served all that the store would have."""
        return not (self.under_chunk or self.missed or self.loaded)

    @property
    def hit(self) -> bool:
        """All that the consumer did not have itself came from the store."""
        return not (self.under_chunk or self.missed or self.hidden)

    @property
    def missed(self) -> bool:
        """Some of it came neither from the store nor from the engine itself."""
        return not self.under_chunk and self.local + self.loaded < self.eligible

    @property
    def sentence(self) -> str:
        """Return why it did not all come from the store; "" if it did."""
        if self.hit:
            return ""
        if self.under_chunk:
            return (
                f"your prompt has {self.tokens} tokens and no whole chunk of {self.chunk_size}"
                " that an engine could load"
            )
        return (
            f"your prompt, {self.name}: {self.loaded} of {self.eligible} eligible tokens came from "
            f"the store, {self.local} from the consumer's own prefix cache"
        )
