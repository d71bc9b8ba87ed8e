// Unpacks the figures and draws them in the colours of the style sheet, and again whenever those change.
(async () => {
  "use strict";
  if (!("DecompressionStream" in window)) return; // the page says so
  document.getElementById("undrawn").remove();
  const root = document.documentElement;
  const plots = [...document.querySelectorAll("[data-figure]")];
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null; // what the button chose; null follows the system

  // The digits of RFC 1924, with a comma for "<".
  const DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;,=>?@^_`{|}~";

  // Five digits are four bytes; the last group may be cut, and so are its bytes.
  function bytes(text) {
    const value = new Uint8Array(128);
    [...DIGITS].forEach((digit, index) => (value[digit.charCodeAt(0)] = index));
    const cut = (5 - (text.length % 5)) % 5;
    const padded = text + "~".repeat(cut);
    const view = new DataView(new ArrayBuffer((padded.length / 5) * 4));
    for (let i = 0, at = 0; i < padded.length; at += 4) {
      let word = 0;
      for (const end = i + 5; i < end; i++) word = word * 85 + value[padded.charCodeAt(i)];
      view.setUint32(at, word);
    }
    return new Uint8Array(view.buffer, 0, view.byteLength - cut);
  }

  function unpack(id) {
    const packed = new Blob([bytes(document.getElementById(id).textContent)]);
    return new Response(packed.stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }

  const colour = (role) => getComputedStyle(root).getPropertyValue(`--${role}`).trim();

  function paintedTrace(trace, text) {
    const own = colour(trace.meta);
    if (trace.type === "bar") return { ...trace, textfont: text, marker: { color: own, opacity: 0.75 } };
    if (trace.type === "heatmap") {
      const scale = own.split(/\s*,\s*/);
      const colorscale = scale.map((each, index) => [index / (scale.length - 1), each]);
      return { ...trace, colorscale, colorbar: { thickness: 10, outlinewidth: 0, tickfont: text, ...trace.colorbar } };
    }
    const line = { width: trace.meta === "reference" ? 1 : 2, ...trace.line, color: own };
    if (trace.meta === "reference") line.dash = "dash";
    const error_y = trace.error_y && { thickness: 1.5, width: 3, ...trace.error_y, color: own };
    return { ...trace, textfont: text, marker: { size: 5, ...trace.marker, color: own }, line, error_y };
  }

  function painted(spec) {
    const text = { color: colour("muted"), size: 11 };
    const axis = { gridcolor: colour("rule"), linecolor: colour("rule"), zeroline: false, automargin: true, tickfont: text };
    const x = { ...axis, spikecolor: colour("muted"), spikethickness: 1, spikedash: "dot" };
    const layout = {
      ...spec.layout,
      autosize: true,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("text") },
      hoverlabel: { bgcolor: colour("card"), bordercolor: colour("rule"), font: { color: colour("text") } },
      xaxis: { ...x, ...spec.layout.xaxis },
      yaxis: { ...axis, ...spec.layout.yaxis },
    };
    return { data: spec.data.map((trace) => paintedTrace(trace, text)), layout };
  }

  function draw() {
    return Promise.all(
      plots.map((plot) => {
        const { data, layout } = painted(figures[plot.dataset.figure]);
        return Plotly.react(plot, data, layout, { responsive: true, displayModeBar: false });
      }),
    );
  }

  function show(theme) {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "light theme" : "dark theme";
    return draw();
  }

  const current = () => chosen ?? (system.matches ? "dark" : "light");
  root.dataset.theme = current(); // unpacking takes a moment, in which the page is read

  const { figures, tables } = JSON.parse(await unpack("data"));
  for (const link of document.querySelectorAll("[data-table]")) {
    link.href = `data:text/csv;charset=utf-8,${encodeURIComponent(tables[link.dataset.table])}`;
  }
  const plotly = document.createElement("script");
  plotly.textContent = await unpack("plotly");
  document.head.append(plotly);

  button.addEventListener("click", () => {
    chosen = current() === "dark" ? "light" : "dark";
    show(chosen);
  });
  system.addEventListener("change", () => show(current()));
  addEventListener("beforeprint", () => show("light"));
  addEventListener("afterprint", () => show(current()));

  await show(current());
  root.dataset.drawn = plots.length; // tools/check_report.py waits for it
})();
