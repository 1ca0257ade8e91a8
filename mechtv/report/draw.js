const night = matchMedia("(prefers-color-scheme: dark)");

/* Draw a figure as wide as its place once that is seen, and in the colours of the page. */
function draw(id, light, dark) {
  const element = document.getElementById(id);
  let width = 0;
  const show = () => {
    const figure = structuredClone(light); // Plotly writes into what it is given
    if (night.matches) change(figure, structuredClone(dark));
    Plotly.react(element, figure.data, figure.layout, config);
  };
  const fit = () => {
    const last = width;
    width = element.offsetWidth || last; // 0 behind another tab
    if (width !== last) last ? Plotly.Plots.resize(element) : show();
  };
  fit();
  addEventListener("load", fit); // with its scroll bar a page is narrower
  addEventListener("change", fit); // another tab was chosen
  night.addEventListener("change", () => width && show());
}

/* Put the leaves of one tree into another. */
function change(tree, leaves) {
  for (const [key, value] of Object.entries(leaves)) {
    const isTree = [value, tree[key]].every((one) => one && typeof one === "object");
    if (isTree && !Array.isArray(value)) change(tree[key], value);
    else tree[key] = value;
  }
}
