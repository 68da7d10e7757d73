"""The Python API: a model, prompts in, texts out."""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, overload

from paceline.core import Completion, Constraint, SamplingParams, Target, is_whole, token_ids
from paceline.drafters import memory, registry
from paceline.drafters.loading import Host
from paceline.drafters.model import ModelDrafter
from paceline.engine.engine import Engine
from paceline.engine.request import Chunk, Request
from paceline.errors import PacelineError, RequestError, UsageError, suggest
from paceline.planning.pass_time import PassTime
from paceline.planning.planner import Planner
from paceline.text.template import ChatTemplate
from paceline.text.tokenizer import Tokenizer
from paceline.weights import hub
from paceline.weights.source import Source, default_sampling, open_model

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages for the model's template."""

Speculate = registry.Spec | Sequence[registry.Spec]
"""Either "auto", "off", one drafter by name or as a mapping with its options, or a list of drafters."""

MAX_NUM_SEQS = 32
"""Requests that run at a time, unless told otherwise. More would hardly raise what a CPU writes in all, and
each of them would wait longer for every token."""

_PLANNERS_KEPT = 16
_OPTIONS = [
    "quantize", "speculate", "threads", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
]  # fmt: skip


class LLM:
    """A loaded model that answers prompts.

    Threads may share one: their requests then share passes. What a request writes never depends on its
    neighbours, on what was answered before, or on speculation.

    Args:
        model: path of a .gguf file or of a folder with safetensors, an alias such as "smollm2",
            org/name[:quant], or what `open_model` returned.
        quantize: "q8" or "q4": round the weights of a folder as they are loaded; see docs/models.md.
        speculate: the default for all calls; see `Speculate`.
        threads: None means one per physical core.
        max_model_len: most tokens of prompt and output together; None means the model's own limit, or as
            much as fits the machine.
        max_num_seqs: most requests that run at a time; the others wait.
        max_num_batched_tokens: most rows of a pass; None means as many as the target takes. Prompts are read
            in smaller chunks anyway, so that nobody waits long for a long one.

    Raises:
        UsageError: an option that does not exist or cannot be met.
        ModelFileError, UnsupportedModelError, ResourceError: the model cannot be had, read or run.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Source,
        *,
        quantize: str | None = None,
        speculate: Speculate = "auto",
        threads: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = MAX_NUM_SEQS,
        max_num_batched_tokens: int | None = None,
        **unknown: Any,
    ) -> None:
        for name in unknown:
            raise UsageError(f"LLM has no option {name!r}", suggest(name, _OPTIONS))
        from paceline.models.target import NativeTarget  # the native part loads only when a model does
        from paceline.native import trim_memory

        if not isinstance(model, str | os.PathLike | Source):
            raise UsageError(f"the model is {model!r}", "give a path, an alias, or an open model")
        if isinstance(model, Source) and quantize is not None:
            raise UsageError("quantize was given with an open model", "give it to open_model")
        registry.configure(speculate, vocab_size=1)  # a typo shows before gigabytes are read
        file = model if isinstance(model, Source) else open_model(hub.resolve(os.fspath(model)), quantize)
        self._assemble(
            NativeTarget.load(file, threads=threads, max_model_len=max_model_len),
            Tokenizer.from_gguf(file.metadata),
            chat_template=ChatTemplate.from_gguf(file.metadata),
            speculate=speculate,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            pass_time=None,
            file=file,
        )
        if file is not model:
            file.forget_arrays()
        trim_memory()

    @classmethod
    def from_target(
        cls,
        target: Target,
        tokenizer: Tokenizer,
        *,
        chat_template: ChatTemplate | None = None,
        speculate: Speculate = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = MAX_NUM_SEQS,
        max_num_batched_tokens: int | None = None,
        pass_time: PassTime | None = None,
    ) -> Self:
        """Use any `Target`. `pass_time` None means measured here."""
        llm = cls.__new__(cls)
        llm._assemble(
            target,
            tokenizer,
            chat_template=chat_template,
            speculate=speculate,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            pass_time=pass_time,
            file=None,
        )
        return llm

    def _assemble(
        self,
        target: Target,
        tokenizer: Tokenizer,
        *,
        chat_template: ChatTemplate | None,
        speculate: Speculate,
        max_model_len: int | None,
        max_num_seqs: int,
        max_num_batched_tokens: int | None,
        pass_time: PassTime | None,
        file: Source | None,
    ) -> None:
        if max_model_len is not None:
            _check_limit("max_model_len", max_model_len, 2, target.context_limit)
        if max_num_batched_tokens is not None:
            _check_limit("max_num_batched_tokens", max_num_batched_tokens, 1, target.max_rows)
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.speculate = speculate
        self.engine = Engine(
            target,
            tokenizer,
            context_limit=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            pass_time=pass_time or PassTime.measure(target),
        )
        self.limit(max_num_seqs)
        self._file = file
        self._identity = "" if file is None else file.identity()
        self.default_params = SamplingParams() if file is None else default_sampling(file.metadata)
        self._host = Host(
            tokenizer,
            target.vocab_size,
            getattr(target, "threads", None),
            measure=PassTime.measure,
            target=target,
            chances=None if file is None else memory.default_file(),
        )
        self._planners: dict[str, Planner] = {}
        self._dropped: deque[Planner] = deque()  # to be closed between steps
        self._choosing = threading.Lock()  # guards the planners
        self._lock = threading.Lock()  # guards the engine
        self._knocking: deque[None] = deque()
        self._arrived: deque[Request] = deque()
        self._cancelled: deque[Request] = deque()
        self._planner(speculate, predicting=False)

    @property
    def context_limit(self) -> int:
        """Most tokens of prompt and output together."""
        return self.engine.context_limit

    @property
    def draft_models(self) -> list[ModelDrafter]:
        """Draft models that were loaded for any call so far."""
        return list(self._host.models.values())

    def limit(self, max_num_seqs: int) -> None:
        """Let at most so many requests run at a time; those that run already go on."""
        _check_limit("max_num_seqs", max_num_seqs, 1, 4096)
        self.engine.scheduler.max_num_seqs = int(max_num_seqs)

    @overload
    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculate: Speculate | None = None,
        prediction: str | Sequence[int] | None = None,
        constraint: Constraint | None = None,
        max_draft: int | None = None,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: list[str] | Sequence[Sequence[int]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculate: Speculate | None = None,
        prediction: str | Sequence[int] | None = None,
        constraint: Constraint | None = None,
        max_draft: int | None = None,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculate: Speculate | None = None,
        prediction: str | Sequence[int] | None = None,
        constraint: Constraint | None = None,
        max_draft: int | None = None,
    ) -> Completion | list[Completion]:
        """Answer one prompt, or several together.

        Token ids include the stop token, or the tokens that spell the stop string; the text does not.

        Args:
            prompt: one `Prompt` or a list of them. Control tokens written in a text prompt count as such;
                in chat messages they are plain text.
            params: for all prompts, or one for each; None means `default_params`, which are the model's own
                where its files name some.
            speculate: overrides the LLM's own for this call.
            prediction: text, or token ids, that the output will resemble; drafts are taken from it.
            constraint: what limits the output, at its start; each completion follows one of its own.
            max_draft: most draft tokens per pass; None leaves it to the planner.

        Returns:
            One completion; a list for several prompts, or for n > 1: the n completions of each prompt in
            order. (For type checkers: put a single prompt with n > 1 into a list.)

        Raises:
            RequestError: a prompt or parameter that cannot be served.
        """
        several = _is_several(prompt)
        prompts = list(prompt) if several else [prompt]
        each = _params_for(prompts, params, self.default_params)
        requests: list[Request] = []
        for one, its in zip(prompts, each, strict=True):
            requests += self.requests(
                one,
                its,
                speculate=speculate,
                prediction=prediction,
                constraint=constraint,
                max_draft=max_draft,
            )
        self.enqueue(requests)
        with Stream(self, requests) as stream:
            completions = stream.completions()
        return completions if several or each[0].n > 1 else completions[0]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculate: Speculate | None = None,
        prediction: str | Sequence[int] | None = None,
        constraint: Constraint | None = None,
        max_draft: int | None = None,
    ) -> Stream:
        """Answer one prompt piece by piece; arguments as in `generate`. The last chunk of each of the n
        completions carries it whole. Breaking off is safe: what was begun is cancelled."""
        if _is_several(prompt):
            raise RequestError("stream takes one prompt", "use generate for several")
        (its,) = _params_for([prompt], params, self.default_params)
        requests = self.requests(
            prompt,
            its,
            speculate=speculate,
            prediction=prediction,
            constraint=constraint,
            max_draft=max_draft,
        )
        self.enqueue(requests)
        return Stream(self, requests)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text prompt, as `generate` would use them."""
        return self.tokenizer.encode(text, parse_special=True)

    def detokenize(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self.tokenizer.decode(token_ids("the list of ids", ids), skip_special=skip_special)

    def clear(self) -> None:
        """Forget cached prompts and what drafters learnt from earlier answers."""
        with self._choosing, self._lock:
            self.engine.clear_cache()
            self._forget_drafters()

    def close(self) -> None:
        """Let drafters save what they keep, and let go of the model file. The LLM is of no use afterwards."""
        for planner in self._planners.values():
            planner.close()
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- for whoever runs the engine: a Stream, a Service ---

    def requests(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        speculate: Speculate | None = None,
        prediction: str | Sequence[int] | None = None,
        constraint: Constraint | None = None,
        max_draft: int | None = None,
    ) -> list[Request]:
        """Make the n requests of one prompt; `enqueue` starts them. Never waits for a pass.

        Raises:
            RequestError: a prompt or parameter that cannot be served.
        """
        if isinstance(prediction, str):
            prediction = self.tokenizer.encode(prediction, add_special=False)
        if max_draft is not None:
            _check_limit("max_draft", max_draft, 0, 2**31 - 1, RequestError)
        ids = self._ids(prompt)
        seed = int.from_bytes(os.urandom(6)) if params.seed is None else int(params.seed)
        expected = [] if prediction is None else token_ids("the prediction", prediction)
        chosen = self.speculate if speculate is None else speculate
        planner = self._planner(chosen, predicting=prediction is not None)
        made: list[Request] = []
        for index in range(params.n):
            request = self.engine.create(
                ids,
                params,
                planner,
                seed=seed + index,
                prediction=expected,
                constraint=None if constraint is None else constraint.fresh(),
                max_draft=max_draft,
                leader=made[0] if made else None,
                index=index,
            )
            request.stats.drafters = [drafter.name for drafter in planner.drafters]
            made.append(request)
        return made

    def enqueue(self, requests: Sequence[Request]) -> None:
        """Let requests take part from the next step on. Never waits."""
        self._arrived.extend(requests)

    def step(self) -> None:
        """Run one pass of all requests, whosever they are; waits for the one that is running."""
        self._knocking.append(None)
        with self._lock:
            self._knocking.pop()
            self._sweep()
            try:
                self.engine.step()
            except BaseException:
                if self.engine.torn:
                    self._forget_drafters()  # one may have been caught half-way
                raise
            self._sweep()

    @property
    def awaited(self) -> bool:
        """Whether a thread wants to step and cannot; one that steps on and on should let it."""
        return len(self._knocking) > 0

    def cancel(self, requests: Sequence[Request]) -> None:
        """Abort requests: now, or right after the step that is running. May be called by the garbage
        collector in the middle of anything, hence never waits."""
        self._cancelled.extend(requests)
        if self._lock.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._lock.release()

    def fail(self, error: Exception) -> None:
        """End all requests because of an error that is nobody's in particular."""
        with self._lock:
            self._sweep()
            self.engine.fail(error)

    def _sweep(self) -> None:
        while self._arrived:
            self.engine.enqueue(self._arrived.popleft())
        while self._cancelled:
            self.engine.abort(self._cancelled.popleft())
        while self._dropped:
            self._dropped.popleft().close()

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, parse_special=True, limit=self.context_limit)
        elif messages := [message for message in _parts(prompt) if isinstance(message, Mapping)]:
            if self.chat_template is None:
                raise RequestError("this model has no chat template", "give the prompt as text")
            if len(messages) < len(prompt):
                raise RequestError("the prompt mixes messages with something else", "give messages only")
            ids = self.chat_template.encode(self.tokenizer, messages, self.context_limit)
        else:
            ids = token_ids("the prompt", prompt)
        if not ids and self.tokenizer.bos_id is not None:
            ids = [self.tokenizer.bos_id]
        return ids

    def _planner(self, speculate: Speculate, *, predicting: bool) -> Planner:
        """The planner of a way to speculate; kept, because drafters learn."""
        try:
            # These are the same with a prediction and without, and are to learn as one.
            key = json.dumps([speculate, predicting and speculate not in ("auto", "off")], sort_keys=True)
        except (TypeError, ValueError):
            raise UsageError(f"speculate is {speculate!r}", "use names and plain options") from None
        with self._choosing:
            if key not in self._planners:
                while len(self._planners) >= _PLANNERS_KEPT:
                    self._dropped.append(self._planners.pop(next(iter(self._planners))))
                self._planners[key] = self._new_planner(speculate, predicting)
            return self._planners[key]

    def _forget_drafters(self) -> None:
        self._planners.clear()
        self._host.reset()

    def _new_planner(self, speculate: Speculate, predicting: bool) -> Planner:
        vocab_size = self.engine.target.vocab_size
        speculation = registry.configure(
            speculate, vocab_size=vocab_size, identity=self._identity, host=self._host
        )
        drafters = speculation.drafters
        if predicting and drafters and all(drafter.name != "prediction" for drafter in drafters):
            drafters.append(registry.create("prediction", vocab_size=vocab_size))
        assert self.engine.pass_time is not None
        return Planner(self.engine.pass_time, drafters, draft_length=speculation.draft_length)


class Stream(Iterator[Chunk]):
    """Chunks of one or more completions as they come. Closing it, or dropping it, cancels what is left."""

    def __init__(self, llm: LLM, requests: Sequence[Request]) -> None:
        self._llm = llm
        self._requests = requests

    def __next__(self) -> Chunk:
        try:
            while True:
                for request in self._requests:
                    if (chunk := request.fetch()) is not None:
                        return chunk
                    if request.error is not None:
                        raise request.error
                if all(request.over for request in self._requests):
                    raise StopIteration
                self._llm.step()
        except BaseException:
            self.close()
            raise

    def completions(self) -> list[Completion]:
        """Run to the end; the completions in order of request."""
        for _ in self:
            pass
        return [request.completion for request in self._requests if request.completion is not None]

    def close(self) -> None:
        left = [request for request in self._requests if not request.over]
        if left:
            self._llm.cancel(left)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _is_several(prompt: object) -> bool:
    parts = _parts(prompt)
    return not isinstance(prompt, str) and len(parts) > 0 and isinstance(parts[0], Sequence)


def _parts(prompt: object) -> Sequence[Any]:
    """The prompt, which can be anything that a caller passed, as characters, ids, messages or prompts."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        raise RequestError(
            f"the prompt is of type {type(prompt).__name__}", "give text, token ids or messages"
        )
    return prompt


def _params_for(
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    default: SamplingParams,
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * len(prompts)
    if not isinstance(params, Sequence) or any(not isinstance(its, SamplingParams) for its in params):
        raise RequestError(f"params is {params!r}", "give SamplingParams(...), or a list of them")
    if len(params) != len(prompts):
        raise RequestError(
            f"{len(params)} sampling parameters for {len(prompts)} prompts",
            "give one for all or one for each",
        )
    return list(params)


def _check_limit(
    name: str, value: object, low: int, high: int, error: type[PacelineError] = UsageError
) -> None:
    if not is_whole(value) or not low <= value <= high:
        raise error(f"{name} is {value!r}", f"give a whole number from {low} to {high}")
