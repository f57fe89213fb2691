"""All commands, grouped as --help lists them. The command line, recipes and tests run the same objects.

A command has its settings in settings/, and a module with the functions prepare and show, which may load torch.
"""

from draftlab.commands.base import Command
from draftlab.commands.settings.auto import AutoConfig
from draftlab.commands.settings.distill import DistillConfig
from draftlab.commands.settings.export import CheckConfig, ExportConfig
from draftlab.commands.settings.latency import PredictConfig, ProfileConfig
from draftlab.commands.settings.make import DesignConfig, EnvConfig, ImportConfig, InitConfig
from draftlab.commands.settings.prune import PruneConfig
from draftlab.commands.settings.replay import ReplayConfig
from draftlab.commands.settings.report import ReportConfig
from draftlab.commands.settings.score import ScoreConfig
from draftlab.commands.settings.search import SearchConfig
from draftlab.config.outputs import OutputsBuildConfig, OutputsInfoConfig

AUTO = Command(
    name="auto",
    config=AutoConfig,
    module="draftlab.commands.auto",
    help="Find the draft with which this machine serves a target fastest, or say that no draft helps; killed runs "
    "resume.",
    example="auto meta-llama/Llama-3.1-8B-Instruct --for vllm --prompts users.jsonl --minutes 240",
    dry_run=True,
    resumes=True,
)
INIT = Command(
    name="init",
    config=InitConfig,
    module="draftlab.commands.init",
    help="Write draftlab.yaml with the default target, source and data of all commands; show the size of local text.",
    example="init --preset tiny",
)
IMPORT = Command(
    name="import",
    config=ImportConfig,
    module="draftlab.commands.import_checkpoint",
    help="Convert a GGUF file, .bin files, a LoRA adapter and its base, or a multimodal model to a text checkpoint.",
    example="import model-q8_0.gguf --out models/model",
    dry_run=True,
)
ENV = Command(
    name="env",
    config=EnvConfig,
    module="draftlab.commands.env",
    help="Show what a bug report needs: versions, the machine and the workspace.",
    example="env",
)
DESIGN = Command(
    name="design",
    config=DesignConfig,
    module="draftlab.commands.design",
    help="Find draft shapes with the same budget, from deep and narrow to shallow and wide.",
    example="design --params 796m --layers 2-12",
)
PRUNE = Command(
    name="prune",
    config=PruneConfig,
    module="draftlab.commands.prune",
    help="Cut a LLaMA-like checkpoint to an exact shape, and refit the draft to follow the source.",
    example="prune --layers 12 --width 2560",
    dry_run=True,
)
DISTILL = Command(
    name="distill",
    config=DistillConfig,
    module="draftlab.commands.distill",
    help="Train a draft model, or a head that reads the target's hidden states, to predict as the target does.",
    example="distill --draft runs/prune-3x128 --text target --steps 2000",
    dry_run=True,
)
SEARCH = Command(
    name="search",
    config=SearchConfig,
    module="draftlab.commands.search",
    help="Find the draft shape and K with which the target is fastest on this machine; a killed search resumes.",
    example="search --minutes 60 --layers 1,2,4",
    dry_run=True,
)
OUTPUTS_BUILD = Command(
    name="outputs build",
    config=OutputsBuildConfig,
    module="draftlab.commands.outputs_build",
    help="Store a target's text and probabilities, to distil drafts or to replay drafts; a killed build resumes.",
    example="outputs build --prompt-file users.jsonl --num-prompts 2000",
    dry_run=True,
    resumes=True,
)
OUTPUTS_INFO = Command(
    name="outputs info",
    config=OutputsInfoConfig,
    module="draftlab.commands.outputs_info",
    help="Show what stored outputs contain, and how many texts repeat themselves; --verify compares with the target.",
    example="outputs info runs/outputs-tiny --verify",
)
SCORE = Command(
    name="score",
    config=ScoreConfig,
    module="draftlab.commands.score",
    help="Measure the acceptance, the speed-up over plain decoding and the accuracy of drafts, here or on servers.",
    example="score --draft runs/distill-3x128 --prompt-file users.jsonl",
    dry_run=True,
)
REPORT = Command(
    name="report",
    config=ReportConfig,
    module="draftlab.commands.report",
    help="Rank drafts by their scores, test which differences are significant, and write a page about them.",
    example="report runs/score-3x128 --html report.html",
)
PROFILE = Command(
    name="profile",
    config=ProfileConfig,
    module="draftlab.commands.profile",
    help="Measure the latency of forward passes by tokens, batch size and context; --law fits a latency law over "
    "shapes.",
    example="profile tiny runs/distill-3x128 --k 4",
    dry_run=True,
)
PREDICT = Command(
    name="predict",
    config=PredictConfig,
    module="draftlab.commands.predict",
    help="Predict the speed-up at every K from acceptance and latency profiles, which may be from different machines.",
    example="predict --draft-profile llama-3.2-1b@h100,graphs --target-profile llama-3.1-8b@h100,graphs "
    "--acceptance 0.7",
)
REPLAY = Command(
    name="replay",
    config=ReplayConfig,
    module="draftlab.commands.replay",
    help="Compute the acceptance of drafts at every K from stored target outputs; only heads also need the target.",
    example="replay runs/outputs-replay-tiny --draft runs/distill-3x128 --k 1-8",
)
CHECK = Command(
    name="check",
    config=CheckConfig,
    module="draftlab.commands.check",
    help="Check that a draft or head fits its target and that servers can run it; exit with code 3 if a check fails.",
    example="check runs/distill-3x128 --target tiny --for vllm",
)
EXPORT = Command(
    name="export",
    config=ExportConfig,
    module="draftlab.commands.export",
    help="Write a draft or head in the format of a server, with a card and a start script; --verify-with tests the "
    "result.",
    example="export runs/distill-3x128 --target tiny --to vllm",
    dry_run=True,
)
PANELS: dict[str, tuple[Command, ...]] = {
    "From a target to a served draft": (AUTO,),
    "Set up": (INIT, IMPORT, ENV),
    "Make a draft": (DESIGN, PRUNE, DISTILL, SEARCH, OUTPUTS_BUILD, OUTPUTS_INFO),
    "Measure": (SCORE, REPORT),
    "Predict": (PROFILE, PREDICT, REPLAY),
    "Ship": (CHECK, EXPORT),
}
COMMANDS: dict[str, Command] = {command.name: command for panel in PANELS.values() for command in panel}
