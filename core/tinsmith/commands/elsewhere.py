"""Commands of a distribution that may not be installed: who types one learns which it is."""

from typing import Any, Final

from typer.core import TyperGroup

from tinsmith.errors import UserError

WORKBENCH: Final = ("simulate", "rehearse", "rehearsal-table", "compile-check", "compile-table", "megatron-plan")


class CommandGroup(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Raise UserError for a command of the workbench that nobody has added."""
        if args[0] in WORKBENCH and self.get_command(ctx, args[0]) is None:
            msg = (
                f"`tinsmith {args[0]}` comes with tinsmith-workbench, which is not installed here, or is broken (see "
                "`tinsmith plugins`); pip install ./tools/workbench in a clone, 'tinsmith[workbench]' from wheels"
            )
            raise UserError(msg)
        return super().resolve_command(ctx, args)
