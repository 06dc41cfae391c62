"""What all endpoints of a server share: the models' text, transcripts, and the drawing of a chat's answers."""

import numpy as np

import tinsmith
from tinsmith.stores import SamplingSessionRecord
from tinsmith_openai.bodies import ChatRequest
from tinsmith_openai.conversations import Conversation
from tinsmith_openai.drawing import sampling_params
from tinsmith_openai.live_answers import Hear
from tinsmith_openai.models import open_model
from tinsmith_openai.refusals import TooLongError
from tinsmith_openai.texts import ModelText, Texts
from tinsmith_openai.transcripts import Transcripts


class Serving:
    """One per server."""

    def __init__(self, context: tinsmith.RoutesContext) -> None:
        self.context = context
        self.transcripts = Transcripts()
        self._texts = Texts(context.sampling.model_directory)

    async def opened(self, caller: tinsmith.Principal, name: str) -> tuple[SamplingSessionRecord, ModelText]:
        """Return the sampling session of a model, and its text. Raise NoSuchModelError if there is none."""
        session = await open_model(self.context.sampling, caller, name)
        return session, await self._texts.of(session.base_model)

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
            most = await self.context.sampling.max_context_tokens(session.base_model) - len(asked.tokens)
        operation = tinsmith.Sample(
            sampling_session_id=session.sampling_session_id,
            snapshot_id=session.snapshot_id,
            prompt_P=np.array(asked.tokens, np.int32),
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
            window = await self.context.sampling.max_context_tokens(session.base_model)
            if operation.fits(window):
                raise
            raise TooLongError(
                num_prompt=len(operation.prompt_P), max_context_tokens=window, max_tokens=operation.params.max_tokens
            ) from error
