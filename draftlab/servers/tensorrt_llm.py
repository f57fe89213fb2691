"""TensorRT-LLM 1.4: checks of drafts, and a start script that follows its source code."""

import shlex
from collections.abc import Iterator

from draftlab.servers.kinds import (
    SCRIPT_DIRECTORY,
    Artifact,
    Finding,
    Launch,
    ServedHead,
    ServerKind,
    error,
    server,
    shell_script,
)

DECODING_TYPES = {"parallel draft": "PARD", "EAGLE-3 head": "Eagle3"}


@server("tensorrt-llm")
class TensorRTLLM(ServerKind):
    parallel = True
    heads = (
        "loads the directory as it is, with the layers in its options, which draftlab export --to tensorrt-llm writes"
    )

    def check_stored_head(self, artifact: Artifact, head: ServedHead) -> Iterator[Finding]:
        if "speculators_model_type" in artifact.config:
            fix = f"draftlab export --to {self.name} writes SpecForge's layout, which TensorRT-LLM reads"
            yield error(self.name, "does not read speculators' layout", fix)

    def script(self, launch: Launch) -> tuple[str, str]:
        lines = [
            "# sh serve.sh [options of trtllm-serve]; untested",
            SCRIPT_DIRECTORY,
            'cat > "$here/speculative.yaml" <<END',
            "speculative_config:",
            f"  decoding_type: {DECODING_TYPES.get(launch.kind, 'Draft_Target')}",
            f"  max_draft_len: {launch.k}",
            '  speculative_model: "$here"',
        ]
        if launch.layer_ids:
            # TensorRT-LLM counts layers from 0; an id in layer_ids is the number of layers up to the state
            captured = ", ".join(str(i - 1) for i in launch.layer_ids)
            lines.append(f"  eagle3_layers_to_capture: [{captured}]")
        options = '--extra_llm_api_options "$here/speculative.yaml"'
        lines += ["END", f'exec trtllm-serve {shlex.quote(launch.target)} {options} "$@"']
        return shell_script(launch, lines)
