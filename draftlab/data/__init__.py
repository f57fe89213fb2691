"""Text: the documents of data sources, token batches to train on, held-out windows and prompts."""

from draftlab.data.batches import Batch as Batch
from draftlab.data.batches import DynamicBatches as DynamicBatches
from draftlab.data.batches import HeldOut as HeldOut
from draftlab.data.batches import TokenBatches as TokenBatches
from draftlab.data.batches import TopLogprobs as TopLogprobs
from draftlab.data.batches import heldout_prompts as heldout_prompts
from draftlab.data.batches import loss_on_of as loss_on_of
from draftlab.data.batches import open_batches as open_batches
from draftlab.data.batches import open_heldout as open_heldout
from draftlab.data.batches import text_batch as text_batch
from draftlab.data.batches import tokenize as tokenize
from draftlab.data.sources import Document as Document
from draftlab.data.sources import Split as Split
from draftlab.data.sources import documents as documents
from draftlab.data.sources import domain_of as domain_of
from draftlab.data.sources import first_source as first_source
from draftlab.data.sources import in_split as in_split
from draftlab.data.sources import is_chat_file as is_chat_file
from draftlab.data.sources import line_name as line_name
from draftlab.data.sources import parse_mixture as parse_mixture
from draftlab.data.sources import take_bytes as take_bytes
from draftlab.data.sources import without_heldout_lines as without_heldout_lines
