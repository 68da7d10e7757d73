"""Several prompts and several samples share passes; each text is what it would have been alone."""

from paceline import LLM, SamplingParams

llm = LLM("smollm2")
prompts = ["The sea is", "The mountain is", "The forest is"]
params = SamplingParams(temperature=0.8, seed=1, max_tokens=16)

together = llm.generate(prompts, params)
for prompt, answer in zip(prompts, together, strict=True):
    alone = llm.generate(prompt, params)
    print(f"{prompt}{answer.text!r}  same alone: {alone.tokens == answer.tokens}")

for sample in llm.generate(["A name for a cat:"], SamplingParams(temperature=1.0, seed=7, max_tokens=6, n=3)):
    print(f"seed {sample.seed}: {sample.text!r}")
