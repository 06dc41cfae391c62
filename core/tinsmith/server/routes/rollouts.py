"""The rollouts of runs, trained and untrained, and the rewards that clients add to them."""

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import Response

from tinsmith.errors import UserError
from tinsmith.protocol import wire
from tinsmith.server.auth import Caller, Viewer, own_run, readable_run
from tinsmith.server.context import API_PREFIX, Context
from tinsmith.server.json_routes import JsonRoute
from tinsmith.server.rollout_views import directory_of, list_of, step_of, view_of
from tinsmith.server.step_rollouts import StepRollouts, read_step

router = APIRouter(prefix=API_PREFIX, tags=["rollouts"], route_class=JsonRoute)

Step = Annotated[int | None, Query(ge=0, lt=2**53)]


@router.post("/runs/{model_id}/rewards")
async def log_rewards(model_id: str, body: wire.LogRewardsRequest, caller: Caller, context: Context) -> dict[str, int]:
    """Add rewards to the rollouts of a step. They may arrive before the pass that trains on these."""
    await own_run(context, caller, model_id)
    max_bytes = context.settings.server.rollout_bytes
    if not max_bytes:
        msg = "this server keeps no rollouts (server.rollout_bytes is 0), so it takes no rewards for them"
        raise UserError(msg)
    rewards = {bytes.fromhex(digest): reward for digest, reward in body.rewards.items()}
    await context.quotas.disk.admit(caller.tenant, 64 + 32 * len(rewards))
    await context.store.log_rewards(model_id, body.step, rewards, max_bytes)
    return {"rewards": len(rewards)}


@router.get("/runs/{model_id}/rollouts", response_model=wire.RolloutList)
async def list_rollouts(model_id: str, caller: Viewer, context: Context, step: Step = None) -> Response:
    """List the rollouts of a step, the highest reward first; without a step, of the newest one that has any.

    Those that were sampled during the step and trained in no pass are there as long as the log has them.
    """
    run = await readable_run(context, caller, model_id)
    steps = await context.store.rollout_steps(model_id)
    chosen = steps[-1] if step is None and steps else step
    directory = directory_of(run.base_model, context.settings, context.plugins)

    async def read() -> StepRollouts:
        if chosen is None:
            return StepRollouts()
        return await read_step(context.store, run, chosen, steps, context.settings.server.rollout_bytes)

    return await context.large_answers.build(
        caller.tenant, read, lambda found: list_of(model_id, steps, chosen, found, directory)
    )


@router.get("/runs/{model_id}/rollouts/{name}", response_model=wire.RolloutView)
async def get_rollout(model_id: str, name: str, caller: Viewer, context: Context) -> Response:
    """Return one rollout: what was given and what was sampled, as tokens, and as text if its tokenizer is here."""
    run = await readable_run(context, caller, model_id)
    step, directory = step_of(name), directory_of(run.base_model, context.settings, context.plugins)

    async def read() -> StepRollouts:
        steps = await context.store.rollout_steps(model_id)
        return await read_step(context.store, run, step, steps, context.settings.server.rollout_bytes)

    return await context.large_answers.build(
        caller.tenant, read, lambda found: view_of(model_id, step, name, found, directory)
    )
