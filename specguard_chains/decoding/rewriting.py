"""How the target writes the steps that are its own: token by token, or at a draft's pace."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, cast

from specguard_chains.decoding.engine import Engine, LogitSession, Session
from specguard_chains.decoding.ledger import Ledger
from specguard_chains.decoding.prompt_lookup import PromptText
from specguard_chains.decoding.speculation import Speculation
from specguard_chains.decoding.speculative import check_chain, check_speculation, check_vocabulary
from specguard_chains.decoding.speculative_session import SpeculativeSession
from specguard_chains.decoding.verification import Verifier
from specguard_chains.errors import ConfigurationError

Proposer = Literal["draft", "prompt"]
REMEDY = "leave out speculate_rewrites"


@dataclass(frozen=True, slots=True)
class SpeculativeRewriting:
    """Speculative decoding of the target's steps. Changes their time, never their law.

    At a temperature above 0 the text is another one of the same law. It begins with the tokens of
    the step that was rejected.
    """

    speculation: Speculation = field(default_factory=Speculation)
    proposer: Proposer = "draft"
    """What proposes tokens: the draft, or what the prompt and the answer so far repeat."""

    def check(self, draft: Engine, target: Engine, verifier: Verifier) -> None:
        """Refuse models that it does not work with.

        Raises:
            ConfigurationError: They are one model, lack logits, or have different tokens; attention
                is to be read of what is written; or a tree is to be copied from the prompt.
        """
        if verifier.needs_grounding:
            raise ConfigurationError(
                "tokens that are proposed to the target have no grounding; leave out "
                "speculate_rewrites, or set confidence_weight=1"
            )
        if draft is target:
            raise ConfigurationError(
                f"{draft.name} is draft and target, so that nothing of its text is written anew; "
                "leave out speculate_rewrites"
            )
        check_speculation(target, self.speculation, REMEDY)
        if self.proposer == "prompt":
            check_chain(self.speculation)
            return
        check_speculation(draft, self.speculation, REMEDY)
        check_vocabulary(draft, target, REMEDY)

    def writer(self, draft: Session, target: Session, ledger: Ledger) -> SpeculativeSession:
        """Return what the target writes with; all that it computes is booked in the ledger."""
        own = cast("LogitSession", target)
        proposer = PromptText(own) if self.proposer == "prompt" else cast("LogitSession", draft)
        return SpeculativeSession(proposer, own, self.speculation, ledger, rewrites=True)

    def followers(self, draft: Session, writer: Session) -> tuple[Session, ...]:
        """Return the sessions that every step is to be appended in."""
        return (draft, writer) if self.proposer == "prompt" else (writer,)
