// The grid of ranks: a line for each node; colour, shape and text say how each stands. Beyond some hundred on a canvas.
"use strict";

const RANK_STATES = {
  running: ["good", "●"], starting: ["busy", "◌"], replaying: ["busy", "▲"], repairing: ["busy", "◆"],
  lost: ["bad", "✕"], finished: ["idle", "■"], away: ["idle", "–"],
};
const MOST_BUTTONS = 256;
const CELL = 12; // pixels on the canvas
let ranksShown = ""; // the shape of what stands there
let pointedAt = 0;

function describeRank(rank, status) {
  const node = status.nodes.length ? `, node ${rank.node} (${status.nodes[rank.node]})` : "";
  const seen = rank.last_seen_s === null ? "" : `, last seen ${seconds(rank.last_seen_s)} ago`;
  const phase = rank.phase === null || rank.phase === rank.state ? "" : `, ${rank.phase}`;
  return `Rank ${rank.rank} (local ${rank.local_rank}${node}): ${rank.state}${phase}, step ${rank.step ?? "–"}, `
    + `pid ${rank.pid ?? "–"}, protection ${rank.protection}${status.state === "done" ? "" : seen}`;
}

function drawRanks(status) {
  const counts = {};
  for (const rank of status.ranks) counts[rank.state] = (counts[rank.state] ?? 0) + 1;
  const unprotected = status.ranks.filter((rank) => rank.protection !== "on").length;
  const legend = Object.entries(counts).map(([state, count]) => `${RANK_STATES[state]?.[1] ?? "?"} ${count} ${state}`);
  if (unprotected) legend.push(`┄ ${unprotected} not protected`);
  setText(byId("ranks-legend"), legend.join("   "));
  if (status.ranks.length > MOST_BUTTONS) drawRanksOnCanvas(status); else drawRanksAsButtons(status);
  pointedAt = Math.max(0, Math.min(pointedAt, status.ranks.length - 1));
  if (byId("rank").dataset.isAsked) setText(byId("rank"), describeRank(status.ranks[pointedAt], status));
  drawRanksTable(status);
}

function pointAtRank(index) {
  const status = state.status;
  if (!status || !status.ranks[index]) return;
  pointedAt = index;
  byId("rank").dataset.isAsked = "yes";
  setText(byId("rank"), describeRank(status.ranks[index], status));
}

/** Arrow keys, Home and End: the number of the rank to go to, null if it is another key. */
function rankByKey(key, count, perLine) {
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: perLine, ArrowUp: -perLine };
  if (key === "Home") return 0;
  if (key === "End") return count - 1;
  return key in steps ? Math.max(0, Math.min(count - 1, pointedAt + steps[key])) : null;
}

function drawRanksAsButtons(status) {
  const host = byId("ranks");
  const shape = status.ranks.map((rank) => `${rank.node}:${rank.rank}`).join();
  if (shape !== ranksShown) {
    ranksShown = shape;
    const nodes = new Map();
    status.ranks.forEach((rank, index) => {
      const cell = make("button", {
        type: "button", class: "cell", tabindex: index === pointedAt ? 0 : -1, "data-index": index,
        onpointerenter: () => pointAtRank(index),
        onfocus: () => pointAtRank(index),
        onkeydown: (event) => {
          const next = rankByKey(event.key, status.ranks.length, 8);
          if (next === null) return;
          event.preventDefault();
          const cells = host.querySelectorAll(".cell");
          cells[index].tabIndex = -1;
          cells[next].tabIndex = 0;
          cells[next].focus();
        },
      });
      if (!nodes.has(rank.node)) nodes.set(rank.node, []);
      nodes.get(rank.node).push(cell);
    });
    host.replaceChildren(...[...nodes].map(([node, cells]) => make("div", { class: "node" },
      make("span", { words: status.nodes[node] || `node ${node}` }), make("div", { class: "cells" }, ...cells))));
  }
  host.querySelectorAll(".cell").forEach((cell) => {
    const rank = status.ranks[Number(cell.dataset.index)];
    const [colour, sign] = RANK_STATES[rank.state] ?? ["idle", "?"];
    const isOpen = rank.protection !== "on" && status.state !== "done";
    cell.className = `cell ${colour}${isOpen ? " unprotected" : ""}`;
    setText(cell, `${sign} ${rank.rank}`);
    const label = `rank ${rank.rank}: ${rank.state}${isOpen ? ", not protected" : ""}`;
    if (cell.getAttribute("aria-label") !== label) cell.setAttribute("aria-label", label);
  });
}

function drawRanksOnCanvas(status) {
  const host = byId("ranks");
  let canvas = host.querySelector("canvas");
  if (!canvas) {
    canvas = make("canvas", { tabindex: 0, role: "img" });
    const at = (event) => Math.floor(event.offsetY / CELL) * canvas.perLine + Math.floor(event.offsetX / CELL);
    canvas.addEventListener("pointermove", (event) => pointAtRank(at(event)));
    canvas.addEventListener("keydown", (event) => {
      const next = rankByKey(event.key, state.status.ranks.length, canvas.perLine);
      if (next !== null) { event.preventDefault(); pointAtRank(next); drawRanksOnCanvas(state.status); }
    });
    host.replaceChildren(canvas);
    ranksShown = "canvas";
  }
  const perLine = Math.max(8, Math.floor(host.clientWidth / CELL / 8) * 8); // whole nodes of eight in a line
  const lines = Math.ceil(status.ranks.length / perLine), ratio = window.devicePixelRatio || 1;
  canvas.perLine = perLine;
  if (canvas.width !== perLine * CELL * ratio || canvas.height !== lines * CELL * ratio) {
    canvas.width = perLine * CELL * ratio;
    canvas.height = lines * CELL * ratio;
    canvas.style.width = `${perLine * CELL}px`;
    canvas.style.height = `${lines * CELL}px`;
  }
  const pen = canvas.getContext("2d"), colours = {};
  for (const name of ["good", "busy", "bad", "idle"]) colours[name] = colourOf(name);
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, perLine * CELL, lines * CELL);
  status.ranks.forEach((rank, index) => {
    const x = (index % perLine) * CELL, y = Math.floor(index / perLine) * CELL;
    const colour = (RANK_STATES[rank.state] ?? ["idle"])[0];
    pen.fillStyle = colours[colour];
    if (colour === "good") pen.fillRect(x + 2, y + 2, CELL - 4, CELL - 4);
    else if (colour === "bad") { pen.fillRect(x + 1, y + 4, CELL - 2, 4); pen.fillRect(x + 4, y + 1, 4, CELL - 2); }
    else { pen.beginPath(); pen.arc(x + CELL / 2, y + CELL / 2, 4, 0, 7); pen.fill(); }
    if (index === pointedAt && byId("rank").dataset.isAsked) {
      pen.strokeStyle = colours[colour];
      pen.strokeRect(x + 0.5, y + 0.5, CELL - 1, CELL - 1);
    }
  });
  canvas.setAttribute("aria-label", `${status.ranks.length} ranks: ${byId("ranks-legend").textContent}`);
}

/** A colour of the styles as a canvas takes it; found out once for each scheme. */
function colourOf(name) {
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const key = `${name} ${isDark}`;
  if (!(key in colourOf.known)) {
    const probe = document.body.appendChild(make("span", { class: name, hidden: true }));
    colourOf.known[key] = getComputedStyle(probe).color;
    probe.remove();
  }
  return colourOf.known[key];
}
colourOf.known = {};

function drawRanksTable(status) {
  const host = byId("ranks-table");
  if (!host.parentElement.open) return;
  const row = (cells, tag) => make("tr", {}, ...cells.map((cell) => make(tag, { words: String(cell ?? "–"), scope: tag === "th" ? "col" : null })));
  const head = row(["rank", "node", "pid", "state", "step", "phase", "last seen", "protection"], "th");
  const rows = status.ranks.slice(0, 1024).map((rank) => row([rank.rank, rank.node, rank.pid, rank.state, rank.step, rank.phase,
    seconds(rank.last_seen_s), rank.protection], "td"));
  host.replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
}
