"""What all endpoints of a server share: the models' text, transcripts, and the drawing of a chat's answers."""

from collections.abc import Callable
from typing import Final

import tinsmith
from tinsmith.stores import SamplingSessionRecord
from tinsmith_openai.bodies import ChatRequest
from tinsmith_openai.conversations import Conversation, read_conversation
from tinsmith_openai.drawing import refuse_many_logprobs, sampling_params
from tinsmith_openai.live_answers import Hear
from tinsmith_openai.models import open_model
from tinsmith_openai.refusals import TooLongError
from tinsmith_openai.text_work import SMALL, Asker, TextWork
from tinsmith_openai.texts import ModelText, Texts
from tinsmith_openai.transcripts import Transcripts

_ANY_WINDOW: Final = 1 << 30


class Serving:
    """One per server."""

    def __init__(self, context: tinsmith.RoutesContext) -> None:
        self.context = context
        self.transcripts = Transcripts()
        self.work = TextWork()
        self._texts = Texts(context.sampling.model_directory)

    async def opened(self, caller: tinsmith.Principal, name: str) -> tuple[SamplingSessionRecord, ModelText]:
        """Return the sampling session of a model, and its text. Raise NoSuchModelError if there is none."""
        session = await open_model(self.context.sampling, caller, name)
        return session, await self._texts.of(session.base_model)

    async def window(self, session: SamplingSessionRecord, num_bytes: int) -> int:
        """Return how many tokens the prompts of a body may have. What is small is encoded in any case.

        So it can wait for an engine that has not reported its context yet; `sample` refuses what does not fit.
        """
        if num_bytes < SMALL:
            return _ANY_WINDOW
        return await self._context_of(session)

    async def _context_of(self, session: SamplingSessionRecord) -> int:
        return await self.context.sampling.max_context_tokens(session.base_model)

    async def read(
        self,
        caller: tinsmith.Principal,
        session: SamplingSessionRecord,
        text: ModelText,
        chat: Callable[[], ChatRequest],
        num_bytes: int,
    ) -> tuple[ChatRequest, Conversation]:
        """Return a chat and its prompt. `num_bytes`: of the request's body."""
        window = await self.window(session, num_bytes)

        def work(asker: Asker) -> tuple[ChatRequest, Conversation]:
            body = chat()
            return body, read_conversation(text, self.transcripts, caller.tenant, body, window=window, asker=asker)

        return await self.work.run(caller.tenant, num_bytes, work)

    async def draw_chat(
        self,
        caller: tinsmith.Principal,
        body: ChatRequest,
        session: SamplingSessionRecord,
        asked: Conversation,
        hear: Hear | None,
    ) -> tinsmith.SampleOutput:
        most = body.max_completion_tokens or body.max_tokens
        if most is None:
            most = await self._context_of(session) - len(asked.tokens)
        if body.logprobs:
            refuse_many_logprobs(body.n * most, body.top_logprobs)
        operation = tinsmith.Sample(
            sampling_session_id=session.sampling_session_id,
            snapshot_id=session.snapshot_id,
            prompt_P=asked.tokens,
            params=sampling_params(body, max_tokens=max(1, most)),
            num_samples=body.n,
            topk_sample_logprobs=body.top_logprobs,
        )
        return await self.sample(caller, session, operation, hear)

    async def sample(
        self,
        caller: tinsmith.Principal,
        session: SamplingSessionRecord,
        operation: tinsmith.Sample,
        hear: Hear | None,
    ) -> tinsmith.SampleOutput:
        """Raise TooLongError if prompt and answer do not fit into the context, whichever process has refused them."""
        try:
            return await self.context.sampling.sample(caller, operation, hear=hear)
        except tinsmith.CapacityError:
            raise
        except tinsmith.UserError as error:
            window = await self._context_of(session)
            if operation.fits(window):
                raise
            raise TooLongError(
                num_prompt=len(operation.prompt_P), max_context_tokens=window, max_tokens=operation.params.max_tokens
            ) from error
