"""What may be imported where: checked in a fresh process, since this one has imported everything."""

import subprocess
import sys
import textwrap


def test_loading_every_plugin_and_the_server_imports_no_framework_and_no_client_of_the_hub() -> None:
    """The command line and an engine need no web framework, either, and start in two thirds of the time without."""
    code = """
        import sys
        import tinsmith.commands.cli, tinsmith.plugins.loading, tinsmith.processes.engine
        plugins = tinsmith.plugins.loading.Plugins.load()
        assert plugins.report()
        tinsmith.commands.cli.build_group(plugins)
        of_servers = {"fastapi", "starlette", "uvicorn", "jwt", "prometheus_client"} & set(sys.modules)
        assert not of_servers, of_servers
        import tinsmith.server.app
        heavy = {"jax", "jaxlib", "torch", "transformers", "vllm", "megatron", "huggingface_hub"} & set(sys.modules)
        assert not heavy, heavy
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
