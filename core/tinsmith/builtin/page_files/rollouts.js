// The rollouts of a run's step, by reward, and one of them in full.

import { read } from "./api.js";
import { $, element, facts, linkTo, number, table } from "./parts.js";

export async function showRollouts(id, step, name) {
  document.title = `rollouts of ${id} - tinsmith`;
  $("rollouts-title").textContent = `Rollouts of ${id}`;
  const found = await read(`/runs/${encodeURIComponent(id)}/rollouts${step === null ? "" : `?step=${encodeURIComponent(step)}`}`);
  drawSteps(id, found);
  drawList(id, found, name);
  await drawRollout(id, name ?? found.rollouts[0]?.rollout);
  $("rollouts-title").focus();
}

const ofStep = (id, step, name) => linkTo(id, { view: "rollouts", step, ...(name ? { rollout: name } : {}) });

function drawSteps(id, found) {
  const { steps, step } = found;
  $("step").replaceChildren(...steps.map((each) => element("option", { value: each, textContent: each, selected: each === step })));
  $("step").disabled = steps.length === 0;
  $("step").onchange = () => { location.hash = ofStep(id, $("step").value); };
  const trained = found.rollouts.length - found.untrained;
  const kept = trained === found.number ? `${found.number} rollouts` : `${trained} of ${found.number} rollouts, those with the highest and lowest advantages`;
  const others = found.untrained ? `, and ${found.untrained} more, sampled and never trained on` : "";
  const more = found.more_samples ? " The step has more samples than are looked at." : "";
  const older = steps[0] > 0 ? ` Those before step ${steps[0]} are dropped or had none.` : "";
  $("kept").textContent = steps.length ? `${kept}${others}.${more}${older}` : "No rollouts: they come with passes whose loss gets the sampler's logprobs. This server may keep none, too (server.rollout_bytes).";
}

function drawList(id, found, shown) {
  const rows = found.rollouts.map((each) => [
    answerOf(each, element("a", { href: ofStep(id, found.step, each.rollout), textContent: each.text ?? each.rollout, ariaCurrent: each.rollout === shown ? "true" : null })),
    number(each.reward), number(each.advantage), number(each.kl), each.prompt_tokens.toLocaleString("en"), each.sampled_tokens.toLocaleString("en"),
  ]);
  const headings = ["Answer", "Reward", "Advantage", "KL", "Given", "Sampled"];
  $("rollout-list").replaceChildren(...(rows.length ? [table("rollouts", headings, rows)] : []));
}

const answerOf = (rollout, link) => (rollout.trained ? link : element("div", {}, link, element("span", { className: "tag", textContent: "not trained" })));

async function drawRollout(id, name) {
  $("rollout").replaceChildren();
  if (!name) return;
  const found = await read(`/runs/${encodeURIComponent(id)}/rollouts/${encodeURIComponent(name)}`);
  const parts = found.parts.map((part) => element("span", {
    className: part.sampled ? "sampled" : "given", textContent: part.text ?? `${part.tokens.join(" ")} `, title: part.sampled ? "sampled" : "given",
  }));
  const told = facts([
    ["trained", found.trained ? undefined : "no: it was sampled during this step, and no pass had it"],
    ["reward", number(found.reward)], ["advantage", number(found.advantage)], ["KL of sampler and trainer", number(found.kl) && `${number(found.kl)} nats for each token`],
    ["tokens", `${found.prompt_tokens} before the answer, ${found.sampled_tokens} sampled`],
  ]);
  const text = element("pre", { className: "text", tabIndex: 0 }, ...parts);
  $("rollout").replaceChildren(element("h2", { textContent: `Rollout ${found.rollout}` }), told, text);
}
