const night = matchMedia("(prefers-color-scheme: dark)");

/* Draw a figure once it has a width, fit it when that changes, and follow the page's colours. */
function draw(id, light, dark) {
  const element = document.getElementById(id);
  let drawn = false;
  const show = () => {
    const figure = structuredClone(light); // Plotly writes into what it is given
    if (night.matches) change(figure, structuredClone(dark));
    drawn = true;
    Plotly.react(element, figure.data, figure.layout, config);
  };
  new ResizeObserver(() => {
    if (element.offsetWidth) drawn ? Plotly.Plots.resize(element) : show();
  }).observe(element);
  night.addEventListener("change", () => drawn && show());
}

/* Put the leaves of one tree into another. */
function change(tree, leaves) {
  for (const [key, value] of Object.entries(leaves)) {
    const isTree = [value, tree[key]].every((one) => one && typeof one === "object");
    if (isTree && !Array.isArray(value)) change(tree[key], value);
    else tree[key] = value;
  }
}
