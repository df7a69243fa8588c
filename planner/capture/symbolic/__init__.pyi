from .builder import ProgramBuilder as ProgramBuilder, open_builder as open_builder
