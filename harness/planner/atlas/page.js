// The page of the atlas: a question, its answers, an overview of models by cards, and the chosen
// cells. Rows are made as they are shown, so that some thousands of cells filter at once.
const { heads, lines, plain, numbers, words, figures, verdicts } =
  JSON.parse(document.getElementById('data').text);
const SHOWN = 100, ANSWERS = 4;
const selects = [...document.querySelectorAll('select')];
const at = id => document.getElementById(id);

function make(tag, given = {}, ...inside) {
  const node = Object.assign(document.createElement(tag), given);
  node.append(...inside);
  return node;
}

const look = cell => cell.Fits.split(' ')[0];
const number = text => Number(text) || 0;
const split = cell => Object.entries(words).filter(([head]) => number(cell[head]))
  .map(([head, word]) => word + ' ' + cell[head]).join(', ');

// ---- recipes of a cell, and the answer for another host memory ----

const recipes = cell => cell.Recipes.split('; ').filter(Boolean).map(text => {
  const all = text.split(' ');
  const one = Object.fromEntries(figures.map((name, i) => [name, all[i]]));
  one.kinds = Object.fromEntries(Object.keys(words).map((head, i) => [head, all[figures.length + i]]));
  return one;
});

// The figures of a cell, which are those of its recipe; empty for none.
const figuresOf = one => Object.fromEntries([
  ...Object.keys(words).map(head => [head, one ? one.kinds[head] : '']),
  ...Object.entries({ 'Needs GiB': 'need', 'Needs +-': 'spread', 'Host GiB': 'host' })
    .map(([head, name]) => [head, one ? one[name] : '']),
  ...Object.entries({ 'Step s': 'step', 'From s': 'stepLow', 'To s': 'stepHigh' })
    .map(([head, name]) => [head, one && one[name] !== '-' ? one[name] : '']),
]);

const given = lines.map(line => {
  const cell = Object.fromEntries(heads.map((head, i) => [head, line[i]]));
  return { ...cell, ...figuresOf(recipes(cell)[0]) };
});
let cells = given, chosen = given, shown = SHOWN, sorted = '', down = false;

// The rule of the planner: the host counts only if the GPU's memory may suffice.
function verdict(one, host) {
  if (one.gpu === 'no' || one.host === '-') return one.gpu;
  const most = number(one.hostMost), least = 2 * number(one.host) - most;
  if (most <= host) return one.gpu;
  return least <= host ? 'tight' : 'host';
}

const half = (one, end) => (number(one.step) + number(one[end])) / 2;
const faster = (one, other) => half(one, 'stepHigh') < half(other, 'stepLow');

// The cell's own recipe if it still fits and none that now fits is surely faster; else the fastest.
// If none fits, the one that lacks the least of a GPU or of the host.
function pick(all, host, has) {
  const [own] = all;
  for (const word of ['yes', 'tight']) {
    const able = all.filter(one => verdict(one, host) === word && one.step !== '-');
    if (!able.length) continue;
    const best = able.reduce((a, b) => number(b.step) < number(a.step) ? b : a);
    return able.includes(own) && !faster(best, own) ? own : best;
  }
  const lacks = one =>
    Math.max((number(one.need) + number(one.spread)) / has, number(one.hostMost) / host);
  return all.reduce((a, b) => lacks(b) < lacks(a) ? b : a);
}

function hosted(cell, host) {
  const all = recipes(cell);
  if (!host || !all.length) return cell;
  const one = pick(all, host, number(cell['Has GiB']));
  const own = one.recipe === cell.Recipe;
  const more = ` --host-memory ${host}GiB`;
  return {
    ...cell, ...figuresOf(one), Recipe: one.recipe, Fits: verdict(one, host),
    'Host has': String(host), Speed: own ? cell.Speed : '',
    Command: cell.Command.replace(/ --recipes .*/, '') + more,
    Export: cell.Export && cell.Export.replace(cell.Recipe, one.recipe) + more,
  };
}

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

// ---- answers ----

// A recipe as code, which breaks at its joints.
function code(recipe, kind = '') {
  const node = make('code', { className: kind });
  recipe.split('+').forEach((part, i) => node.append(...(i ? ['+', make('wbr')] : []), part));
  return node;
}

function sentence(cell) {
  if (look(cell) === 'not') return `not predicted: ${cell.Recipe}`;
  const need = `needs ${cell['Needs GiB']} +- ${cell['Needs +-']} of ${cell['Has GiB']} GiB`;
  const time = cell['Step s'] ? `, ${cell['Step s']} s a step (${cell['From s']} to ${cell['To s']})` : '';
  const speed = cell.Speed ? `, ${cell.Speed}` : '';
  return `${need}${look(cell) === 'no' ? '' : time + speed}`;
}

const parts = cell => Object.entries(words).flatMap(([head, word], i) => number(cell[head])
  ? [make('span', {}, make('i', { className: 'c' + i }), `${word} ${cell[head]}`), ' '] : []);

function rivals(cell) {
  const host = number(cell['Host has']);
  const all = recipes(cell).filter(one => one.recipe !== cell.Recipe);
  if (!all.length) return '';
  const row = one => make('tr', {}, make('td', {}, code(one.recipe)),
    make('td', { className: 'f ' + verdict(one, host) }, verdict(one, host)),
    ...['need', 'host', 'step'].map(name => make('td', { className: 'n' }, one[name])));
  const heads = ['Other recipes', 'Fits', 'GiB', 'Host', 'Step s'];
  const top = make('tr', {}, ...heads.map(head => make('th', {}, head)));
  return make('div', { className: 'scroll' },
    make('table', { className: 'rivals' }, make('thead', {}, top), make('tbody', {}, ...all.map(row))));
}

function answer(cell) {
  const host = cell['Host GiB'] && cell['Host GiB'] !== '-' &&
    `Host memory: ${cell['Host GiB']} of ${cell['Host has']} GiB of a machine.`;
  const more = [host]
    .filter(Boolean).join(' ');
  const told = verdicts[look(cell)];
  const commands = [['Plan it', cell.Command], ['Export it to your trainer', cell.Export]]
    .filter(([, text]) => text)
    .map(([word, text]) => make('p', {}, word + ': ', make('code', { className: 'all' }, text)));
  const what = [cell.Training, `${cell.GPUs} x ${cell.Card}`, cell.Sample].filter(Boolean).join(', ');
  return make('article', {}, make('h2', {}, `${cell.Model}: ${what}`),
    make('p', {}, make('span', { className: 'f ' + look(cell) }, told), ' ',
      look(cell) === 'not' ? '' : code(cell.Recipe, 'best')),
    make('p', {}, sentence(cell)), split(cell) ? bar(cell) : '',
    split(cell) ? make('p', { className: 'parts' }, 'At the peak, GiB: ', ...parts(cell)) : '',
    make('p', { className: 'note' }, more),
    ...commands, rivals(cell));
}

// The command that plans a cell which the atlas does not have. Other filters may hide one it has.
function missing() {
  const [model, card, gpus] = ['Model', 'Card', 'GPUs'].map(name => at(name).value);
  if (cells.some(cell => cell.Model === model && cell.Card === card && (!gpus || cell.GPUs === gpus)))
    return make('p', { className: 'note' }, 'No cell of this model and card passes all filters.');
  const option = /^[0-9]/.test(card) ? '--gpu-memory' : '--gpu';
  const host = at('host').value ? ` --host-memory ${at('host').value}GiB` : '';
  const command = `./run.sh plan --model ${model} --gpus ${gpus || 1} ${option} ${card}${host}`;
  return make('p', {}, 'The atlas has no such cell. Plan it: ',
    make('code', { className: 'all' }, command));
}

function answers() {
  const asked = at('Model').value && at('Card').value;
  const some = asked && chosen.length <= ANSWERS ? chosen : [];
  const hint = 'Choose a model, a card and a number of GPUs: the answers appear here, and the '
    + "address of the page then names the question. No usual recipe that fits is over "
    + '10 % faster than an answer.';
  at('answers').replaceChildren(...some.length ? some.map(answer)
    : [asked && !chosen.length ? missing() : make('p', { className: 'note' }, hint)]);
}

function details(cell) {
  const told = [
    split(cell) && 'At the peak: ' + split(cell) + ' GiB',
    cell.Sample && 'Sample: ' + cell.Sample,
    cell['Step s'] && `Step: ${cell['Step s']} s (${cell['From s']} to ${cell['To s']})`,
    cell['Host GiB'] && `Host: ${cell['Host GiB']} of ${cell['Host has']} GiB of a machine`,
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
  const recipe = make('div', {}, code(cell.Recipe), split(cell) ? bar(cell) : '');
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
    if (!at('GPUs').value) at('GPUs').value = first.GPUs;
    filter();
    at('answers').scrollIntoView();
  });
  return node;
}

function overview() {
  const groups = new Map();
  for (const cell of chosen) {
    const key = cell.Model + '\n' + cell.Card;
    groups.set(key, [...(groups.get(key) || []), cell]);
  }
  const [models, cards] = ['Model', 'Card'].map(head =>
    [...at(head).options].map(o => o.value).filter(o => chosen.some(c => c[head] === o)));
  const top = make('tr', {}, make('th'), ...cards.map(card => make('th', {}, card)));
  at('overview').replaceChildren(make('thead', {}, top), make('tbody', {}, ...models.map(model =>
    make('tr', {}, make('th', {}, model),
      ...cards.map(card => square(groups.get(model + '\n' + card) || []))))));
}

function list() {
  const value = cell => numbers.includes(sorted) ? parseFloat(cell[sorted]) : cell[sorted];
  const missing = cell => cell[sorted] === '' || Number.isNaN(value(cell));
  const order = (a, b) => missing(a) - missing(b) ||
    (down ? -1 : 1) * (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0);
  const rows = sorted ? [...chosen].sort(order) : chosen;
  for (const head of document.querySelectorAll('th[data-sort]')) {
    head.ariaSort = head.dataset.sort !== sorted ? 'none' : down ? 'descending' : 'ascending';
  }
  at('rows').replaceChildren(...rows.slice(0, shown).map(row));
  at('more').hidden = rows.length <= shown;
  at('more').textContent = `Show all ${rows.length}`;
}

function filter() {
  const host = number(at('host').value);
  cells = host ? given.map(cell => hosted(cell, host)) : given;
  chosen = cells.filter(cell => selects.every(s => !s.value || matches(cell, s)));
  shown = SHOWN;
  at('count').textContent = `${chosen.length} of ${cells.length} cells`;
  answers();
  overview();
  list();
  keep();
}

const matches = (cell, s) => s.id === 'Fits' ? look(cell) === s.value.split(' ')[0]
  : cell[s.id] === s.value;

// ---- the question in the page's address ----

const controls = () => [...selects, at('host')];

function keep() {
  const pairs = controls().filter(c => c.value).map(c => [c.id, c.value]);
  if (sorted) pairs.push(['sort', (down ? '-' : '') + sorted]);
  const text = new URLSearchParams(pairs).toString();
  if (text !== location.hash.slice(1)) history.replaceState(null, '', text ? '#' + text : '#');
}

function read() {
  const asked = new URLSearchParams(location.hash.slice(1));
  for (const one of controls()) {
    one.value = asked.get(one.id) ?? '';
    if (one.selectedIndex < 0) one.value = '';
  }
  const text = asked.get('sort') ?? '';
  down = text.startsWith('-');
  sorted = plain.includes(text.replace(/^-/, '')) ? text.replace(/^-/, '') : '';
  filter();
}

controls().forEach(c => c.addEventListener('input', filter));
document.querySelector('form').addEventListener('submit', event => event.preventDefault());
document.querySelector('form').addEventListener('reset', () => setTimeout(filter));
document.querySelector('#cells thead').addEventListener('click', event => {
  const head = event.target.closest('th[data-sort]');
  if (!head) return;
  [sorted, down] = [head.dataset.sort, head.dataset.sort === sorted && !down];
  list();
  keep();
});
at('more').addEventListener('click', () => { shown = chosen.length; list(); });
window.addEventListener('hashchange', read);
read();
