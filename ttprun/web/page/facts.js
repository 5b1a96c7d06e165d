// Protection, topology, saved state, the event log.

const LOSS_WORDS = {
  peer: "nothing: its state comes from a rank that holds the same",
  buddy: "nothing: its state comes from its mirror in shared memory",
  snapshot: "the steps since the newest snapshot: all ranks go back to it",
  restart: "all ranks start again, from what the script has saved",
};

/** Ranks in few words: "0–7, 12". */
function rankList(ranks) {
  const parts = [];
  for (let index = 0; index < ranks.length; index += 1) {
    const first = ranks[index];
    while (ranks[index + 1] === ranks[index] + 1) index += 1;
    parts.push(first === ranks[index] ? `${first}` : `${first}–${ranks[index]}`);
  }
  return parts.slice(0, 40).join(", ") + (parts.length > 40 ? ` and ${parts.length - 40} more` : "");
}

/** Steps that another process has taken again (--verify-steps), among the events that the page has. */
function verifiedWords() {
  const verified = state.events.filter((event) => event.event === "step_verified"), newest = verified.at(-1);
  if (!newest) return "";
  const equal = verified.filter((event) => event.finding === "equal").length;
  return `Steps taken again by another process: ${verified.length}, of which ${equal} equal; the newest: step ${newest.step} of rank ${newest.rank}, ${newest.finding}${newest.finding === "equal" ? "" : `: ${newest.what}`}.`;
}

function drawProved(status) {
  const items = status.not_proved.map((name) => make("li", { words: name }));
  byId("proved").replaceChildren(
    make("p", { words: withKind(status.protection !== "on" && !status.reason ? status.reason_kind : "", status.protection === "on" ? "Protected: a lost rank is replaced and no step is lost." : status.protection.replace(/^not yet:/, "Not protected yet:").replace(/^off:/, "Not protected:").replace(/^on, but/, "Protected, but")) }),
    items.length
      ? make("div", {}, make("p", { class: "note", words: "These can change but are not recorded; a replacement has them as the script's set-up makes them:" }), make("ul", {}, ...items))
      : make("p", { class: "note", words: "Everything that can change is recorded." }),
    verifiedWords() ? make("p", { words: verifiedWords() }) : "");
}

function drawTopology(topology) {
  if (!topology) return;
  const byLoss = new Map();
  for (const rank of topology.ranks) byLoss.set(rank.loss, [...(byLoss.get(rank.loss) ?? []), rank.rank]);
  const row = (cells, tag) => make("tr", {}, ...cells.map((cell) => make(tag, { words: cell, scope: tag === "th" ? "col" : null })));
  const table = (head, rows) => make("table", {}, make("thead", {}, row(head, "th")), make("tbody", {}, ...rows.map((cells) => row(cells, "td"))));
  const parts = [table(["ranks", "losing one costs"], [...byLoss].map(([loss, ranks]) => [rankList(ranks), LOSS_WORDS[loss] ?? loss]))];
  const groups = Object.entries(topology.groups);
  if (groups.length) parts.push(make("h3", { words: "Groups" }), table(["group", "ranks"], groups.slice(0, 64).map(([name, ranks]) => [name, rankList(ranks)])));
  parts.push(make("h3", { words: "Ranks that hold the same state" }), table(["set", "ranks"], topology.replicas.slice(0, 64).map((ranks, index) => [`${index}`, rankList(ranks)])));
  if (topology.unequal.length) parts.push(make("p", { class: "note", words: `Parameters that differ between ranks: ${topology.unequal.slice(0, 8).join(", ")}` }));
  byId("topology").replaceChildren(...parts);
}

function drawSaved(status) {
  const facts = [];
  const one = status.checkpoint;
  if (one) facts.push(["checkpoint", one.path && !one.reason ? `step ${one.boundary} (${one.cause}), ${bytes(one.bytes)} in ${seconds(one.took_s)}, ${one.path}` : `step ${one.boundary} (${one.cause}) was not saved: ${one.reason}`]);
  else facts.push(["checkpoint", "none yet"]);
  if (status.cost !== null) {
    const taken = Object.values(status.cost.parts).reduce((sum, part) => sum + part, 0);
    const share = (100 * taken / status.cost.step_s).toFixed(1);
    facts.push(["protection takes", `${(1000 * taken).toFixed(2)} ms of a step of ${(1000 * status.cost.step_s).toFixed(1)} ms (${share} %)`]);
  }
  facts.push(["snapshot", status.snapshot_step === null ? "none" : `step ${status.snapshot_step}, in shared memory`]);
  if (status.resume) facts.push(["resumed", `${status.resume.outcome}, step ${status.resume.boundary ?? "–"}: ${status.resume.reason}`]);
  facts.push(["save_dir", status.save_dir ?? "–"]);
  facts.push(["standbys", `${status.standbys}${status.standby_state ? ` (${status.standby_state})` : ""}`]);
  const named = status.nodes.map((name, number) => `${number}: ${name}`), more = named.length - 16;
  facts.push(["nodes", named.length ? named.slice(0, 16).join(", ") + (more > 0 ? ` and ${more} more` : "") : status.host]);
  if (status.lost_nodes.length) facts.push(["lost nodes", status.lost_nodes.map((number) => named[number]).join(", ")]);
  if (status.nodes.length) facts.push(["spares", status.spares.join(", ") || "none"]);
  if (status.quarantine.length) facts.push(["quarantine", `${status.quarantine.join(", ")}: was lost before, and has to wait until it may train again`]);
  if (status.nodes.length) facts.push(["this node", `${status.node}${status.is_leading ? " (leads)" : "; the page of the leading node has all events"}`]);
  if (status.away.length) facts.push(["away", rankList(status.away)]);
  byId("saved").replaceChildren(...facts.flatMap(([name, text]) => [make("dt", { words: name }), make("dd", { words: text })]));
}

const EVENTS_SHOWN = 300;

function inShort(value) {
  if (typeof value === "number" && !Number.isInteger(value)) return String(Number(value.toPrecision(4)));
  return typeof value === "object" ? JSON.stringify(value) : value;
}

function eventText(event) {
  return Object.entries(event).filter(([name, value]) => !["at", "at_s", "event"].includes(name) && value !== null && value !== "")
    .map(([name, value]) => `${name}=${inShort(value)}`).join(" ");
}

function drawEvents() {
  const wanted = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = [];
  let found = 0;
  for (let index = state.events.length - 1; index >= 0; index -= 1) {
    const event = state.events[index], text = eventText(event);
    const all = `${event.at} ${event.event} ${text}`.toLowerCase();
    if (!wanted.every((word) => all.includes(word))) continue;
    found += 1;
    if (found <= EVENTS_SHOWN) rows.push(make("tr", {}, make("td", { words: event.at.slice(11, 23) }), make("td", { words: event.event }), make("td", { words: text.slice(0, 600) })));
  }
  byId("events").replaceChildren(...rows);
  setText(byId("found"), wanted.length ? `${found} of ${state.events.length}` : `${state.events.length}, the newest first`);
}
