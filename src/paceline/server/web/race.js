// The race: one prompt, plain and with speculation, each alone on the machine; then both replayed in step.

import { stream, unreachable } from "./api.js";
import { Answer, blank, note, tokens } from "./answer.js";
import { explain } from "./chat.js";

const PROMPT = `Add a docstring to every function below and print the whole file again.

def area(width, height):
    if width < 0 or height < 0:
        raise ValueError("sides must not be negative")
    return width * height


def perimeter(width, height):
    if width < 0 or height < 0:
        raise ValueError("sides must not be negative")
    return 2 * (width + height)`;
const $ = (id) => document.getElementById(id);

let lanes = null;
let running = null;
let model = null;
let replaying = 0;

export function setModel(name) {
  model = name;
}

export function begin(onLost) {
  $("race-prompt").value ||= PROMPT;
  lanes = { plain: lane("lane-plain"), auto: lane("lane-auto") };
  $("start").onsubmit = (event) => {
    event.preventDefault();
    if (!running && $("race-prompt").value.trim()) race(onLost);
  };
  $("race-stop").onclick = stop;
  $("replay").onclick = replay;
}

const lane = (id) => ({ box: $(id), answer: new Answer($(id)), record: blank() });

export function stop() {
  running?.abort();
  clearTimeout(replaying);
}

async function race(onLost) {
  clearTimeout(replaying);
  running = new AbortController();
  working(true);
  for (const one of Object.values(lanes)) {
    one.record = blank();
    one.answer.clear();
    one.box.classList.remove("ahead");
  }
  const seed = Math.floor(Math.random() * 2 ** 31);
  try {
    say("Plain decoding…");
    await run(lanes.plain, { off: true }, seed);
    say("The same with speculation…");
    await run(lanes.auto, { drafter: "auto" }, seed);
    judge();
  } catch (error) {
    say(explain(error));
    if (unreachable(error)) onLost();
  }
  running = null;
  working(false);
}

async function run(one, speculation, seed) {
  const since = performance.now();
  const body = {
    model,
    messages: [{ role: "user", content: $("race-prompt").value }],
    temperature: Number($("race-temperature").value),
    max_tokens: Number($("race-tokens").value),
    seed,
    speculation,
  };
  await stream(body, running.signal, (event) => {
    const pass = note(one.record, event, since);
    if (pass) one.answer.add(pass);
  });
  one.answer.finish(one.record);
}

function judge() {
  const [plain, auto] = [lanes.plain.record, lanes.auto.record];
  const [one, other] = [tokens(plain), tokens(auto)];
  const same = one.length === other.length && one.every((id, i) => id === other[i]);
  const ratio = auto.rate / plain.rate;
  $("verdict").replaceChildren();
  const strong = document.createElement("strong");
  strong.textContent = same ? `identical: yes, all ${one.length} tokens` : "identical: NO. Please report this as a bug.";
  $("verdict").append(strong, ` · ${ratio.toFixed(2)} times the speed while decoding`);
  (ratio > 1 ? lanes.auto : lanes.plain).box.classList.add("ahead");
  $("replay").hidden = false;
}

/** Play both records again at the times their tokens came, the first tokens together. */
function replay() {
  clearTimeout(replaying);
  const started = performance.now();
  const left = Object.values(lanes).map((one) => {
    one.answer.clear();
    return { ...one, next: 0, offset: one.record.passes[0]?.at ?? 0 };
  });
  const tick = () => {
    const now = performance.now() - started;
    for (const one of left) {
      const { passes } = one.record;
      while (one.next < passes.length && passes[one.next].at - one.offset <= now) {
        one.answer.add(passes[one.next++]);
        if (one.next === passes.length) one.answer.finish(one.record);
      }
    }
    if (left.some((one) => one.next < one.record.passes.length)) replaying = setTimeout(tick, 16);
  };
  tick();
}

function say(what) {
  $("verdict").textContent = what;
}

function working(on) {
  $("race-stop").hidden = !on;
  $("go").disabled = on;
  if (on) $("replay").hidden = true;
}
