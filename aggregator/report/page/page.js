"use strict";
// Fills the figures that the page carries as skeletons. Figures and colours are decided where the page is written; here
// are only the arrays that a choice of kind, field, site or step changes.
(async () => {
  const root = document.documentElement, byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const OBSERVED = 1, ZERO = 6, narrow = () => window.innerWidth < 700;

  async function inflate(text) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }
  const kept = new Map();
  function once(key, make) {
    if (!kept.has(key)) kept.set(key, make());
    return kept.get(key);
  }
  const rowsOf = (flat, width) => Array.from({ length: flat.length / width }, (_, i) => flat.subarray(i * width, (i + 1) * width));

  function states(kind) {
    return once(kind, async () => rowsOf(await inflate(data.kinds[kind].state), data.kinds[kind].lo.length));
  }
  function values(kind, field) {
    return once(`${kind} ${field}`, async () => {
      const planes = await inflate(data.kinds[kind].fields[field].values), size = planes.length / 4;
      const bytes = new Uint8Array(planes.length);
      for (let plane = 0; plane < 4; plane++) for (let i = 0; i < size; i++) bytes[4 * i + plane] = planes[plane * size + i];
      return rowsOf(new Float32Array(bytes.buffer), data.kinds[kind].lo.length);
    });
  }
  const span = (grid, i) => grid.lo[i] === grid.hi[i] ? `step ${grid.lo[i]}` : `steps ${grid.lo[i]}–${grid.hi[i]}`;
  const spans = (grid) => grid.lo.map((_, i) => span(grid, i));
  const centers = (grid) => grid.lo.map((low, i) => (low + grid.hi[i]) / 2);
  const codeOf = (state, value) => state === OBSERVED && value === 0 ? ZERO : state;
  const markOf = new Map(data.marks.map((mark) => [mark.code, mark]));
  const number = (value) => Number.isNaN(value) ? "none" : Number(value.toPrecision(4)).toString();
  const positive = (value) => value > 0 ? value : null;

  function transform(scale, value) {
    if (scale.kind === "log") return value > 0 ? Math.log10(value) : null;
    if (scale.kind === "symlog") return Number.isNaN(value) ? null : Math.sign(value) * Math.log10(1 + Math.abs(value) / scale.unit);
    return Number.isNaN(value) ? null : value;
  }

  // Theme: charts take the colours of the page.
  const themes = ["system", "light", "dark"];
  let theme = themes[0];
  function themed(layout) {
    const style = getComputedStyle(root), colour = (name) => style.getPropertyValue(name).trim();
    const out = { ...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { ...layout.font, family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("--ink") },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--soft"), activecolor: colour("--accent") },
      hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), align: "left", font: { color: colour("--ink") } } };
    for (const [name, axis] of Object.entries(out)) {
      if (!/^[xy]axis\d*$/.test(name)) continue;
      out[name] = { ...axis, gridcolor: colour("--grid"), tickcolor: colour("--grid") };
    }
    return out;
  }
  const drawn = new Map();
  // Of choices that follow each other quickly the last one is drawn, whichever is unpacked first.
  const turns = new Map();
  function turn(id) {
    const mine = (turns.get(id) ?? 0) + 1;
    turns.set(id, mine);
    return () => turns.get(id) === mine;
  }
  async function draw(id, traces, layout, isCurrent = () => true) {
    if (!isCurrent()) return;
    const element = byId(id);
    if (!drawn.has(id)) element.replaceChildren();
    drawn.set(id, [traces, layout]);
    for (const trace of traces) if (trace.texttemplate) trace.textfont = { ...trace.textfont, color: getComputedStyle(root).getPropertyValue("--ink").trim() };
    const config = { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
      displayModeBar: narrow() ? false : "hover" };
    // The page answers between two charts.
    await new Promise((done) => setTimeout(done));
    if (!isCurrent()) return;
    return Plotly.react(element, traces, themed(layout), config);
  }
  async function redraw() { for (const [id, [traces, layout]] of drawn) await draw(id, traces, layout); }

  function fill(select, options, chosen) {
    select.replaceChildren(...options.map((option) => new Option(option, option, false, option === chosen)));
    if (options.includes(chosen)) select.value = chosen;
  }
  const copy = (figure) => structuredClone(figure);

  async function heatmap() {
    const isCurrent = turn("heatmap");
    const kind = byId("heat-kind").value, field = byId("heat-field").value, grid = data.kinds[kind];
    const scale = grid.fields[field].scale, found = await values(kind, field), state = await states(kind);
    const figure = copy(data.figures.heatmap), columns = spans(grid), [cells, marks] = figure.data;
    const shared = { x: grid.edges, y: grid.names, text: grid.names.map(() => columns) };
    Object.assign(cells, shared, { z: found.map((row) => Array.from(row, (value) => transform(scale, value))), customdata: found,
      hovertemplate: `<b>%{y}</b><br>%{text}<br>${field} %{customdata:.4g}<extra></extra>`,
      colorscale: scale.kind === "symlog" ? data.palettes.diverging : data.palettes.sequential, zmin: scale.low, zmax: scale.high });
    const bar = cells.colorbar;
    Object.assign(bar, { tickvals: scale.ticks.map((tick) => tick[0]), ticktext: scale.ticks.map((tick) => tick[1]),
      title: { ...bar.title, text: scale.label } });
    if (narrow()) Object.assign(bar, { orientation: "h", x: 0.5, xanchor: "center", y: 1.01, yanchor: "bottom", title: { text: scale.label, side: "top" } });
    const codes = found.map((row, i) => Array.from(row, (value, j) => codeOf(state[i][j], value)));
    const about = (code, value) => !markOf.has(code) ? "" : markOf.get(code).word + (Number.isNaN(value) || code === ZERO ? "" : `<br>${field} of the finite ones: ${number(value)}`);
    Object.assign(marks, shared, { z: codes.map((row) => row.map((code) => markOf.has(code) ? code : null)),
      customdata: codes.map((row, i) => row.map((code, j) => about(code, found[i][j]))) });
    const room = narrow() ? 22 : 60, every = Math.max(1, Math.ceil(grid.names.length / room)), ticks = [];
    for (let i = 0; i < grid.names.length; i += every) ticks.push(i);
    const words = narrow() ? grid.tiny : grid.short;
    Object.assign(figure.layout.yaxis, { tickvals: ticks, ticktext: ticks.map((i) => words[i]) });
    figure.layout.height = Math.min(900, Math.max(260, 130 + 11 * grid.names.length));
    await draw("heatmap", figure.data, figure.layout, isCurrent);
  }

  async function profile() {
    const isCurrent = turn("profile");
    const field = byId("depth-field").value, figure = copy(data.figures.profile), traces = [], first = data.profile.kinds[0];
    const slider = byId("depth-step"), at = Number(slider.value);
    byId("depth-out").textContent = first ? span(data.kinds[first], at) : "";
    let next = 0;
    for (const [number_, kind] of data.profile.kinds.entries()) {
      const grid = data.kinds[kind], found = await values(kind, field), state = await states(kind);
      const places = grid.names.map((_, i) => i), shown = data.profile.columns[number_];
      const chosen = Math.min(grid.lo.length - 1, Math.round(at / Math.max(1, slider.max) * (grid.lo.length - 1)));
      const line = (trace, column) => ({ ...trace, x: places, y: found.map((row) => positive(row[column])), text: grid.names, name: span(grid, column),
        hovertemplate: `<b>%{text}</b><br>${span(grid, column)}<br>${field} %{y:.4g}<extra></extra>` });
      for (const column of shown) traces.push(line(figure.data[next++], column));
      const template = figure.data[next - 1];
      traces.push({ ...line(template, chosen), name: `compare: ${span(grid, chosen)}`, legendgroup: "compare",
        line: { color: getComputedStyle(root).getPropertyValue("--ink").trim(), width: 2.6 } });
      const worst = found.map((row, i) => Math.max(...[...shown, chosen].map((column) => codeOf(state[i][column], row[column]))));
      traces.push(strip(figure.data[next++], places, grid.names, worst));
      const axis = figure.layout[number_ ? `yaxis${2 * number_ + 1}` : "yaxis"];
      axis.title = { ...axis.title, text: `${kind}<br>${field}` };
      if (narrow()) { const names = figure.layout[`xaxis${2 * number_ + 2}`]; names.tickvals = places.filter((i) => i % Math.ceil(places.length / 10) === 0); names.ticktext = names.tickvals.map((i) => grid.tiny[i]); }
    }
    await draw("profile", traces, figure.layout, isCurrent);
  }
  function strip(trace, x, names, codes) {
    const at = codes.map((_, i) => i).filter((i) => markOf.has(codes[i])), marks = at.map((i) => markOf.get(codes[i]));
    return { ...trace, x: at.map((i) => x[i]), y: at.map(() => 0), text: at.map((i, k) => `<b>${names[i]}</b><br>${marks[k].word}`),
      marker: { ...trace.marker, symbol: marks.map((mark) => mark.symbol), color: marks.map((mark) => mark.colour) } };
  }

  const heights = () => once("heights", () => inflate(data.ridges.heights));
  async function ridges() {
    const isCurrent = turn("ridges");
    const kind = byId("ridge-kind").value, site = byId("ridge-site").value;
    const chosen = data.ridges.sites.find((one) => one.kind === kind && one.site === site), all = await heights();
    const away = Array.from({ length: chosen.bins }, (_, i) => data.ridges.begin + (i + 0.5) * data.ridges.width);
    const x = [...away.map((place) => -place).reverse(), ...away], bins = x.length;
    const figure = copy(data.figures.ridges), last = figure.data.length - 1, table = figure.data[last];
    const ends = [x[0], ...x, x[bins - 1]];
    const shapes = chosen.steps.map((step, i) => {
      const row = all.subarray(chosen.at + i * bins, chosen.at + (i + 1) * bins);
      return { ...figure.data[0], x: ends, y: [i, ...Array.from(row, (height) => i + data.ridges.overlap * height / 255), i], name: `step ${step}` };
    });
    table.textfont = { size: narrow() ? 9 : 11 };
    Object.assign(table, { x: data.ridges.bands, y: chosen.steps.map((_, i) => i), z: chosen.shares.map((row) => row.map((share) => 100 * share[0])),
      text: chosen.shares.map((row) => row.map((share) => share[1])), customdata: chosen.steps.map((step) => data.ridges.bands.map(() => step)) });
    const layout = figure.layout, rows = { tickvals: chosen.steps.map((_, i) => i), ticktext: chosen.steps.map(String) };
    for (const name of ["yaxis", "yaxis2"]) Object.assign(layout[name], rows, { range: [-0.6, chosen.steps.length + data.ridges.overlap - 0.6] });
    const ticks = narrow() ? chosen.ticks.filter((_, i) => i % 2 === (chosen.ticks.length - 1) / 2 % 2) : chosen.ticks;
    Object.assign(layout.xaxis, { tickvals: ticks.map((tick) => tick[0]), ticktext: ticks.map((tick) => tick[1]), range: [x[0] - 0.5, x[bins - 1] + 0.5] });
    if (narrow()) { layout.xaxis.domain = [0, 0.52]; layout.xaxis2.domain = [0.55, 1]; layout.xaxis2.tickangle = -90; layout.xaxis.title.text = "value (log2)"; layout.xaxis2.title.text = "share of all"; }
    layout.height = 140 + 42 * Math.max(4, chosen.steps.length);
    await draw("ridges", [...shapes.reverse(), table], layout, isCurrent);
  }
  function ridgeSites(wanted) {
    const kind = byId("ridge-kind").value;
    fill(byId("ridge-site"), data.ridges.sites.filter((one) => one.kind === kind).map((one) => one.site), wanted);
  }

  async function ratio() {
    const isCurrent = turn("ratio");
    const site = byId("ratio-site").value, grid = data.kinds.update, row = grid.names.indexOf(site);
    const found = (await values("update", "update_to_weight"))[row], state = (await states("update"))[row];
    const figure = copy(data.figures.ratio), x = centers(grid), text = spans(grid), lines = figure.data.length - 2;
    figure.data.slice(0, lines).forEach((trace, i) => Object.assign(trace, { x, text, y: data.ratio.quantiles[i] }));
    Object.assign(figure.data[lines], { x, text, y: Array.from(found, positive), name: site,
      hovertemplate: `<b>${site}</b><br>%{text}<br>%{y:.3g}<extra></extra>` });
    figure.data[lines + 1] = strip(figure.data[lines + 1], x, text, Array.from(found, (value, i) => codeOf(state[i], value)));
    await draw("ratio", figure.data, figure.layout, isCurrent);
  }

  function show(error) {
    const told = document.createElement("p");
    told.className = "problem";
    told.textContent = `The interactive charts cannot be drawn here (${error.message}); the pictures show the same data.`;
    document.querySelector(".verdict").after(told);
    root.classList.remove("js");
  }
  const on = (id, act) => byId(id)?.addEventListener("input", () => act().catch(show));

  function kindsOf(fields) { return Object.keys(data.kinds).filter((kind) => fields(data.kinds[kind])); }
  async function begin() {
    const code = new TextDecoder().decode(await inflate(byId("plotly").textContent)), script = document.createElement("script");
    script.textContent = code;
    document.head.append(script);
    root.classList.add("js");
    byId("theme").addEventListener("click", () => {
      theme = themes[(themes.indexOf(theme) + 1) % themes.length];
      if (theme === "system") delete root.dataset.theme; else root.dataset.theme = theme;
      byId("theme").textContent = `theme: ${theme}`;
      redraw().catch(show);
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw().catch(show));
    if (data.figures.heatmap) {
      fill(byId("heat-kind"), kindsOf(() => true), data.start.kind);
      const fields = () => fill(byId("heat-field"), Object.keys(data.kinds[byId("heat-kind").value].fields), byId("heat-field").value || data.start.field);
      fields();
      on("heat-kind", () => { fields(); return heatmap(); });
      on("heat-field", heatmap);
      await heatmap();
      root.dataset.first = String(Math.round(performance.now()));
      byId("heatmap").on("plotly_click", (event) => {
        const chosen = { kind: byId("heat-kind").value, site: event.points[0].y };
        if (data.ridges.sites.some((one) => one.kind === chosen.kind && one.site === chosen.site)) {
          byId("ridge-kind").value = chosen.kind; ridgeSites(chosen.site); ridges().catch(show);
        }
        if (chosen.kind === "update" && data.figures.ratio) { byId("ratio-site").value = chosen.site; ratio().catch(show); }
      });
    }
    if (data.figures.profile) {
      const [first] = data.profile.kinds;
      fill(byId("depth-field"), Object.keys(data.kinds[first].fields).filter((name) => data.kinds[first].fields[name].scale.kind !== "symlog"), data.start.depth);
      byId("depth-step").max = data.kinds[first].lo.length - 1;
      byId("depth-step").value = byId("depth-step").max;
      on("depth-field", profile);
      on("depth-step", profile);
      await profile();
    }
    if (data.figures.ridges) {
      fill(byId("ridge-kind"), [...new Set(data.ridges.sites.map((one) => one.kind))], data.ridges.start.kind);
      ridgeSites(data.ridges.start.site);
      on("ridge-kind", () => { ridgeSites(byId("ridge-site").value); return ridges(); });
      on("ridge-site", ridges);
      await ridges();
    }
    if (data.figures.ratio) {
      fill(byId("ratio-site"), data.kinds.update.names, data.ratio.start);
      on("ratio-site", ratio);
      await ratio();
    }
    for (const name of ["coverage", "cost"]) if (data.figures[name]) await draw(name, data.figures[name].data, data.figures[name].layout);
    root.dataset.ready = String(Math.round(performance.now()));
  }
  begin().catch((error) => { show(error); throw error; });
})();
