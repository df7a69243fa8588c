from .provenance import ProvenanceCollector as ProvenanceCollector
