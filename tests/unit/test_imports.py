"""What may be imported where: checked in a fresh process, since this one has imported everything."""

import subprocess
import sys
import textwrap


def test_loading_every_plugin_and_the_server_imports_no_framework_and_no_client_of_the_hub() -> None:
    code = """
        import sys
        import tinsmith, tinsmith.plugins, tinsmith.server.app, tinsmith.commands.cli, tinsmith.plugins.loading
        plugins = tinsmith.plugins.loading.Plugins.load()
        assert plugins.report()
        heavy = {"jax", "jaxlib", "torch", "transformers", "vllm", "megatron", "huggingface_hub"} & set(sys.modules)
        assert not heavy, heavy
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
