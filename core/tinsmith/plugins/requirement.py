"""Whether a plugin may run here: its distribution requires tinsmith as any package does, for instance `tinsmith~=0.1`.

pip asks for that only when it installs; an environment can be put together without it. What a plugin implements or is
handed may differ in another release, so none of the plugin's code runs before the requirement is checked:
docs/adr/0013-plugins-require-tinsmith.md.
"""

from importlib.metadata import EntryPoint, version

from packaging.requirements import Requirement

from tinsmith.errors import PluginError


def check_requirement(entry_point: EntryPoint) -> None:
    """Raise PluginError if the distribution of a plugin does not admit this version of tinsmith."""
    distribution = entry_point.dist
    if distribution is None:
        return
    core = version("tinsmith")
    for each in map(Requirement, distribution.requires or ()):
        applies = each.marker is None or each.marker.evaluate({"extra": ""})
        if each.name.lower() == "tinsmith" and applies and not each.specifier.contains(core, prereleases=True):
            msg = (
                f"it needs tinsmith{each.specifier}, and this is tinsmith {core}; install a release of "
                f"{distribution.name} that admits it, or another tinsmith"
            )
            raise PluginError(msg)
