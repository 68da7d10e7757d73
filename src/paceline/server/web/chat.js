// The chat: messages kept for this tab, so that a reload shows them again.

import { Refusal, stream, unreachable } from "./api.js";
import { Answer, blank, element, note, text } from "./answer.js";

const STORE = "paceline-chat";
const RELOADED = "Interrupted by a reload.";
const $ = (id) => document.getElementById(id);

let turns = [];
let running = null;
let model = null;
let leaving = false;

export function setModel(name) {
  model = name;
}

export function begin(onLost) {
  turns = restore();
  for (const turn of turns) show(turn);
  $("ask").onsubmit = (event) => {
    event.preventDefault();
    const typed = $("message").value;
    if (typed.trim() && !running) {
      $("message").value = "";
      send(typed, onLost);
    }
  };
  $("message").onkeydown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("ask").requestSubmit();
    }
  };
  for (const event of ["beforeunload", "pagehide"]) addEventListener(event, () => (leaving = true));
  addEventListener("pagehide", save);
  $("stop").onclick = stop;
  $("clear").onclick = () => {
    stop();
    turns = [];
    save();
    $("log").replaceChildren();
    $("message").focus();
  };
}

export function stop() {
  running?.abort();
}

function restore() {
  try {
    const kept = JSON.parse(sessionStorage.getItem(STORE)) ?? [];
    for (const turn of kept) if (turn.record && !turn.record.finish) turn.record.note ??= RELOADED;
    return kept;
  } catch {
    return [];
  }
}

function save() {
  try {
    sessionStorage.setItem(STORE, JSON.stringify(turns));
  } catch { /* a full or forbidden store costs the memory of this chat, not the chat */ }
}

function show(turn) {
  $("log").append(element("li", {}, element("div", { className: "user", textContent: turn.asked })));
  const box = element("article", { className: "answer" });
  box.setAttribute("aria-label", "Answer");
  $("log").append(element("li", {}, box));
  const answer = new Answer(box);
  if (turn.record) answer.show(turn.record);
  $("log").scrollTop = $("log").scrollHeight;
  return answer;
}

async function send(asked, onLost) {
  const record = blank();
  const turn = { asked, record };
  const messages = turns.flatMap((t) => [
    { role: "user", content: t.asked },
    { role: "assistant", content: text(t.record) },
  ]);
  turns.push(turn);
  save();
  const answer = show({ asked });
  running = new AbortController();
  working(true);
  const since = performance.now();
  const speculation = $("speculation").value;
  const body = {
    model,
    messages: [...messages, { role: "user", content: asked }],
    temperature: Number($("temperature").value),
    max_tokens: Number($("max-tokens").value),
    speculation: speculation === "off" ? { off: true } : { drafter: speculation },
  };
  try {
    await stream(body, running.signal, (event) => {
      const log = $("log");
      const following = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      const pass = note(record, event, since);
      if (pass) {
        answer.add(pass);
        if (following) log.scrollTop = log.scrollHeight;
      }
    });
  } catch (error) {
    record.note = leaving ? RELOADED : explain(error);
    if (unreachable(error)) onLost();
  }
  record.finish ??= "stopped";
  answer.finish(record);
  running = null;
  working(false);
  save();
}

export function explain(error) {
  if (error.name === "AbortError") return "Stopped.";
  if (error instanceof Refusal) return `The server refused: ${error.message}`;
  return "The connection was lost; what came before is kept.";
}

function working(on) {
  $("stop").hidden = !on;
  $("send").disabled = on;
  if (!on) $("message").focus();
}
