// Texts of a page whose contrast with what lies behind them is below 4.5 (WCAG 2.2, AA): [contrast, text].
const luminance = (rgb) => {
  const f = rgb.map((v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * f[0] + 0.7152 * f[1] + 0.0722 * f[2];
};
const numbers = (text) => text.match(/[\d.]+/g).map(Number);
const behind = (node) => {
  for (; node; node = node.parentElement) {
    const colour = numbers(getComputedStyle(node).backgroundColor);
    if (colour.length < 4 || colour[3] === 1) return colour.slice(0, 3);
  }
  return [255, 255, 255];
};
const hasText = (node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
return [...document.querySelectorAll("body *")].filter((node) => node.checkVisibility() && hasText(node)).map((node) => {
  const [a, b] = [numbers(getComputedStyle(node).color).slice(0, 3), behind(node)].map(luminance);
  return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.textContent];
}).filter(([contrast]) => contrast < 4.5);
