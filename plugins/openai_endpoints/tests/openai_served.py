"""A server of toy models with a tokenizer, a checkpoint or more, and OpenAI's clients."""

import asyncio
import json
import threading
from pathlib import Path

import tinker
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from tinsmith import BackendSpec, Failed, OnTokens, Sample, SampleOutput, hookimpl
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.settings import ModelSettings, PluginSection
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model
from tinsmith_openai.bodies import ChatRequest
from tinsmith_openai.conversations import Conversation, read_conversation
from tinsmith_openai.text_work import Asker
from tinsmith_openai.texts import ModelText
from tinsmith_openai.transcripts import Transcripts

VOCAB_SIZE = 128
CONTEXT = 2048
END = VOCAB_SIZE - 1
"""The end of the toy's sequences."""

TEMPLATE = """\
{%- if tools %}{% for tool in tools %}tool {{ tool.function.name }}; {% endfor %}{% endif %}
{%- for message in messages %}[{{ message.role }}] {{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<end>
{%- endfor %}
{%- if add_generation_prompt %}[assistant] {% endif %}"""


TINY_TEMPLATE = """\
{%- if tools %}{% for tool in tools %}<tool_call>{{ tool | tojson }}</tool_call>{% endfor %}{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }} {{ message.content or '' }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant {% endif %}"""


def write_model(directory: Path) -> Path:
    """Write the tokenizer of the toy's vocabulary: token i is the character chr(32 + i), the last one is the end."""
    directory.mkdir()
    words = {chr(32 + token): token for token in range(END)} | {"<end>": END}
    tokenizer = Tokenizer(WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<end>"}))
    return directory


def write_tiny_chat_model(directory: Path, shape: TinyShape) -> None:
    """Write a tiny model whose template shows tools, and says how they are called."""
    write_tiny_model(directory, shape)
    (directory / "chat_template.jinja").write_text(TINY_TEMPLATE)


def toy_model(directory: Path, *, plugin: str = "toy") -> ModelSettings:
    return ModelSettings(
        name="toy",
        path=write_model(directory),
        backend=PluginSection.model_validate(
            {"plugin": plugin, "vocab_size": VOCAB_SIZE, "max_context_tokens": CONTEXT}
        ),
    )


def prompt_of(text: ModelText, kept: Transcripts, tenant: str, body: ChatRequest) -> Conversation:
    return read_conversation(text, kept, tenant, body, window=1 << 20, asker=Asker())


def encoded(text: ModelText, said: str) -> list[int]:
    return text.encode(said, special=False, window=1 << 20, asker=Asker()).tolist()


def tokens_of(text: str) -> list[int]:
    return [ord(character) - 32 for character in text]


def train_to_say(
    service: tinker.ServiceClient, text: str, *, client: tinker.TrainingClient | None = None, steps: int = 16
) -> tinker.TrainingClient:
    """Train an adapter until its greedy continuation of the text's beginning is the text. A new one by default."""
    training = client or service.create_lora_training_client(base_model="toy", rank=8, seed=1).result()
    tokens = tokens_of(text)
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    futures = []
    for _ in range(steps):
        futures.append(training.forward_backward([datum], "cross_entropy"))
        futures.append(training.optim_step(tinker.AdamParams(learning_rate=0.05)))
    for future in futures:
        future.result()
    return training


def checkpoint(client: tinker.TrainingClient, name: str) -> str:
    path = client.save_weights_for_sampler(name).result().path
    assert path is not None
    return path


class Patient(ToyBackend):
    """Draws, tells three tokens of each sequence, and ends when it may."""

    may_end, cancelled = threading.Event(), threading.Event()
    fails = False

    async def sample_streaming(self, op: Sample, on_tokens: OnTokens) -> SampleOutput | Failed:
        output = await self.sample(op)
        assert isinstance(output, SampleOutput)
        for index, sequence in enumerate(output.sequences):
            on_tokens(index, 0, sequence.tokens[:2].tolist())
            on_tokens(index, 0, sequence.tokens[:1].tolist())
            on_tokens(index, 1, sequence.tokens[1:3].tolist())
        try:
            await asyncio.to_thread(self.may_end.wait)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return Failed(message="lost on the way") if self.fails else output


class PatientBackends:
    @hookimpl
    def tinsmith_register_backends(self) -> BackendSpec[ToyConfig]:
        return BackendSpec(name="patient", config=ToyConfig, create=Patient, needs_model_path=False)
