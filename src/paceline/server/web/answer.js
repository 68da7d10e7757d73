// One answer on the page: its tokens in the colours of their sources, what it cost, what was drafted.

const KNOWN = ["ngram", "suffix", "prediction", "grammar"];

export const element = (tag, props = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), props);
  made.append(...children);
  return made;
};

const hue = (source) => (source === "" ? "model" : KNOWN.includes(source) ? source : "other");
const label = (source) => (source === "" ? "the model itself" : source);

/** A record of an answer: everything needed to draw it again. */
export const blank = () => ({ passes: [], finish: null, rate: null, note: null });

export const text = (record) => record.passes.map((pass) => pass.pieces.join("")).join("");
export const tokens = (record) => record.passes.flatMap((pass) => pass.tokens);

/** What one event of the stream adds to a record; returns the new pass, if it brought tokens. */
export function note(record, event, since) {
  const told = event.paceline;
  const choice = event.choices?.[0];
  if (choice?.finish_reason) record.finish = choice.finish_reason;
  if (event.timings) record.rate = event.timings.predicted_per_second;
  if (event.metrics) record.speculation = event.metrics.speculative_decoding;
  if (!told?.tokens.length) return null;
  const { tokens: ids, sources, pieces, drafted } = told;
  const pass = { tokens: ids, sources, pieces, drafted, at: performance.now() - since };
  record.passes.push(pass);
  return pass;
}

export class Answer {
  constructor(parent) {
    this.body = element("div", { className: "text" });
    this.warning = element("p", { className: "note", hidden: true });
    this.facts = element("p", { className: "facts" });
    this.plot = element("canvas", { role: "img" });
    this.legend = element("ul", { className: "legend" });
    parent.append(this.body, this.warning, this.facts, this.plot, this.legend);
    this.clear();
    new ResizeObserver(() => this.draw()).observe(this.plot);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  clear() {
    this.body.replaceChildren();
    this.legend.replaceChildren();
    this.facts.replaceChildren();
    this.warning.hidden = true;
    this.plot.hidden = true;
    delete this.body.dataset.only;
    this.passes = [];
    this.counts = new Map();
    this.drafted = 0;
  }

  /** Draw a whole record at once. */
  show(record) {
    this.clear();
    for (const pass of record.passes) this.add(pass);
    this.finish(record);
  }

  add(pass) {
    this.passes.push(pass);
    this.drafted += pass.drafted;
    pass.pieces.forEach((piece, i) => {
      const source = pass.sources[i];
      const title = `${label(source)} · token ${pass.tokens[i]}`;
      const kind = source === "" ? "model" : `drafted ${hue(source)}`;
      const span = element("span", { className: kind, textContent: piece, title });
      span.dataset.source = source;
      this.body.append(span);
      this.counts.set(source, (this.counts.get(source) ?? 0) + 1);
    });
    if (!this.due) this.due = requestAnimationFrame(() => this.refresh());
  }

  refresh(record) {
    cancelAnimationFrame(this.due);
    this.due = 0;
    const count = [...this.counts.values()].reduce((sum, n) => sum + n, 0);
    const kept = count - (this.counts.get("") ?? 0);
    const first = this.passes[0];
    const last = this.passes.at(-1);
    const lived = first && last.at - first.at;
    const rate = record?.rate ?? (lived ? ((count - first.tokens.length) * 1000) / lived : 0);
    const perPass = record?.speculation?.tokens_per_pass ?? count / Math.max(1, this.passes.length);
    const facts = [["tokens", count], ["tokens/s", rate.toFixed(1)], ["tokens per pass", perPass.toFixed(2)]];
    if (this.drafted) facts.push(["drafts kept", `${kept} of ${this.drafted}`]);
    this.facts.replaceChildren(...facts.map(([name, value]) =>
      element("span", {}, `${name} `, element("b", { textContent: value }))));
    this.draw();
    this.list();
  }

  finish(record) {
    this.refresh(record);
    const reason = record.speculation?.off_reason;
    if (!this.drafted && reason) this.facts.append(element("span", { textContent: `nothing drafted: ${reason}` }));
    this.warning.textContent = record.note ?? (record.finish === "length" ? "Cut at the most tokens allowed." : "");
    this.warning.hidden = !this.warning.textContent;
  }

  list() {
    if (this.counts.size < 2 && this.counts.has("")) return;
    const pressed = this.body.dataset.only;
    const order = [...this.counts.keys()].sort();
    this.legend.replaceChildren(...order.map((source) => {
      const button = element("button", {
        type: "button",
        className: hue(source),
        textContent: `${label(source)} ${this.counts.get(source)}`,
        onclick: () => this.only(pressed === source ? undefined : source),
      });
      button.setAttribute("aria-pressed", String(pressed === source));
      return element("li", {}, button);
    }));
  }

  /** Show the tokens of one source only in colour. */
  only(source) {
    if (source === undefined) delete this.body.dataset.only;
    else this.body.dataset.only = source;
    for (const span of this.body.children) span.classList.toggle("shown", span.dataset.source === source);
    this.list();
  }

  /** One bar for each pass: what was drafted in outline, what was kept filled. */
  draw() {
    this.plot.hidden = !this.drafted;
    if (!this.drafted) return;
    const scale = devicePixelRatio || 1;
    const width = (this.plot.width = this.plot.clientWidth * scale);
    const height = (this.plot.height = this.plot.clientHeight * scale);
    const style = getComputedStyle(this.plot);
    const context = this.plot.getContext("2d");
    const most = Math.max(...this.passes.map((pass) => pass.drafted));
    const step = Math.min(8 * scale, width / this.passes.length);
    const unit = (height - scale) / most;
    this.passes.forEach((pass, i) => {
      const kept = pass.sources.filter((source) => source !== "").length;
      const bar = Math.max(1, step - scale);
      context.fillStyle = style.getPropertyValue("--line");
      context.fillRect(i * step, height - scale - pass.drafted * unit, bar, pass.drafted * unit + scale);
      context.fillStyle = style.getPropertyValue("--accent");
      context.fillRect(i * step, height - scale - kept * unit, bar, kept * unit);
    });
    const kept = this.passes.reduce((sum, pass) => sum + pass.sources.filter((s) => s !== "").length, 0);
    const told = `${this.passes.length} passes; ${this.drafted} tokens drafted, ${kept} kept, at most ${most} in a pass`;
    this.plot.setAttribute("aria-label", told);
    this.plot.title = `Each bar is a pass of the model: grey drafted, coloured kept. ${told}`;
  }
}
