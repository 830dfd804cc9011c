// The page of the atlas: filters, an overview of models by cards, and the cells that are chosen.
// Rows are made as they are shown, so that some thousands of cells filter at once.
const { heads, lines, plain, numbers, words } = JSON.parse(document.getElementById('data').text);
const SHOWN = 100;
const cells = lines.map(line => Object.fromEntries(heads.map((head, i) => [head, line[i]])));
const selects = [...document.querySelectorAll('select')];
const at = id => document.getElementById(id);
let chosen = cells, shown = SHOWN;

function make(tag, given = {}, ...inside) {
  const node = Object.assign(document.createElement(tag), given);
  node.append(...inside);
  return node;
}

const look = cell => cell.Fits.split(' ')[0];
const number = text => Number(text) || 0;
const split = cell => Object.entries(words).filter(([head]) => number(cell[head]))
  .map(([head, word]) => word + ' ' + cell[head]).join(', ');

// The categories at the peak instant, as shares of the card, or of the need where that is more.
function bar(cell) {
  const sizes = Object.keys(words).map(head => number(cell[head]));
  const whole = Math.max(number(cell['Has GiB']), sizes.reduce((a, b) => a + b, 0));
  const node = make('div', { className: 'bar', role: 'img', ariaLabel: split(cell) });
  sizes.forEach((size, i) => {
    if (!size) return;
    const part = make('span', { className: 'c' + i });
    part.style.width = (100 * size / whole).toFixed(1) + '%';
    node.append(part);
  });
  return node;
}

function details(cell) {
  const told = [
    split(cell) && 'At the peak: ' + split(cell) + ' GiB',
    cell.Sample && 'Sample: ' + cell.Sample,
    cell['Step s'] && 'Step: ' + cell['Step s'] + ' +- ' + cell['+-'] + ' s',
    cell['Host GiB'] && `Host: ${cell['Host GiB']} of ${cell['Host has']} GiB of a node`,
  ].filter(Boolean).map(text => make('div', {}, text));
  const command = make('div', {}, make('code', {}, cell.Command));
  return make('details', {}, make('summary', {}, 'more'), ...told, command);
}

function td(head, inside, kind = '') {
  const node = make('td', { className: kind }, inside);
  node.dataset.head = head;
  return node;
}

function row(cell) {
  const kinds = head => numbers.includes(head) ? 'n' : head === 'Fits' ? 'f ' + look(cell) : '';
  const code = make('code');
  cell.Recipe.split('+').forEach((part, i) => code.append(...(i ? ['+', make('wbr')] : []), part));
  const recipe = make('div', {}, code, split(cell) ? bar(cell) : '');
  return make('tr', {}, ...plain.map(head => td(head, cell[head], kinds(head))),
    td('Recipe and memory', recipe, 'w'), td('', details(cell), 'w'));
}

// One square a chosen cell; where there is one alone, its step time or what it needs.
function square(group) {
  if (!group.length) return make('td');
  const told = c => `${c.Training}, ${c.GPUs} x ${c.Card}: ${c.Fits}` +
    (c['Step s'] ? `, ${c['Needs GiB']} GiB, ${c['Step s']} s` : '');
  const [first] = group;
  const text = group.length > 1 ? '' : look(first) === 'no' ? first['Needs GiB'] + ' GiB'
    : look(first) === 'host' ? 'host ' + first['Host GiB'] + ' GiB'
    : first['Step s'] ? first['Step s'] + ' s' : first.Fits;
  const node = make('td', { title: group.map(told).join('\n') },
    ...group.map(cell => make('i', { className: look(cell) })), text);
  node.addEventListener('click', () => {
    for (const name of ['Model', 'Card']) at(name).value = first[name];
    filter();
    at('cells').scrollIntoView();
  });
  return node;
}

function overview() {
  const groups = new Map();
  for (const cell of chosen) {
    const key = cell.Model + '\n' + cell.Card;
    groups.set(key, [...(groups.get(key) || []), cell]);
  }
  const [models, cards] = ['Model', 'Card'].map(head => [...new Set(chosen.map(c => c[head]))]);
  const top = make('tr', {}, make('th'), ...cards.map(card => make('th', {}, card)));
  at('overview').replaceChildren(make('thead', {}, top), make('tbody', {}, ...models.map(model =>
    make('tr', {}, make('th', {}, model),
      ...cards.map(card => square(groups.get(model + '\n' + card) || []))))));
}

function list() {
  at('rows').replaceChildren(...chosen.slice(0, shown).map(row));
  at('more').hidden = chosen.length <= shown;
  at('more').textContent = `Show all ${chosen.length}`;
}

function filter() {
  chosen = cells.filter(cell => selects.every(s => !s.value || cell[s.id] === s.value));
  shown = SHOWN;
  at('count').textContent = `${chosen.length} of ${cells.length} cells`;
  overview();
  list();
}

selects.forEach(s => s.addEventListener('change', filter));
document.querySelector('form').addEventListener('reset', () => setTimeout(filter));
at('more').addEventListener('click', () => { shown = chosen.length; list(); });
filter();
