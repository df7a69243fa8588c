"""The generator of stand-in functions: a prototype gets a definition that does what its name says."""

from planner.emulator.child.libraries.prototypes import Library, generate, parse_prototypes

HEADER = """
typedef struct fooContext *fooHandle_t;
typedef struct fooPlanOpaque_t *fooPlan_t;
extern fooStatus_t fooCreate(fooHandle_t *handle);
fooStatus_t fooDestroy(fooHandle_t handle);
fooStatus_t fooGetWorkspaceSize(fooHandle_t, int n, size_t *bytes);
fooStatus_t fooLaunch(fooHandle_t handle, void (*callback)(void *data), const size_t *sizes);
const char *fooGetErrorString(fooStatus_t status);
void fooSetLogger(int level);
static inline fooStatus_t fooInline(int n) { return 0; }
fooStatus_t barOther(void);
"""
FOO = Library("foo", "0", ("foo.h",))


def definition(name: str, library: Library = FOO) -> str:
    """Return the generated line that defines this function."""
    lines = generate(library, HEADER, (), ()).splitlines()
    (text,) = [line for line in lines if f" {name}(" in line or f"*{name}(" in line]
    return text


def test_finds_the_prototypes_of_its_own_prefix_alone() -> None:
    """Functions of other libraries and those that the header defines itself are left alone."""
    prototypes, handles = parse_prototypes(HEADER, "foo")
    names = [prototype.name for prototype in prototypes]
    assert names == [
        *("fooCreate", "fooDestroy", "fooGetWorkspaceSize", "fooLaunch", "fooGetErrorString", "fooSetLogger"),
    ]
    assert handles == {"fooHandle_t", "fooPlan_t"}


def test_a_function_that_creates_gives_an_opaque_object() -> None:
    """A handle that is made is not null, since callers look."""
    assert "*handle = emu_handle();" in definition("fooCreate")


def test_a_function_that_returns_a_size_gives_zero() -> None:
    """A size that is not written would be garbage."""
    assert "__builtin_memset(bytes, 0, sizeof *bytes);" in definition("fooGetWorkspaceSize")


def test_a_parameter_without_a_name_gets_one() -> None:
    """C wants a name for each parameter of a definition."""
    assert "fooGetWorkspaceSize(fooHandle_t a0_, int n, size_t *bytes)" in definition("fooGetWorkspaceSize")


def test_what_is_const_is_not_written() -> None:
    """Sizes that a caller passes in are the caller's."""
    assert "memset" not in definition("fooLaunch")


def test_a_function_without_a_result_returns_nothing() -> None:
    """A void function that returned its library's answer would not compile."""
    assert definition("fooSetLogger").endswith("return ; }")


def test_a_function_that_is_defined_already_is_not_generated() -> None:
    """Two definitions of one function do not link."""
    assert "fooCreate" not in generate(FOO, HEADER, ["fooCreate"], ())


def test_an_import_without_a_prototype_is_defined_too() -> None:
    """Torch's libraries do not load while an imported symbol is missing."""
    assert "int fooPrivate(void)" in generate(FOO, HEADER, (), ["fooPrivate"])


def test_functions_without_a_handle_go_on_to_the_installed_library() -> None:
    """Descriptors are the real library's; what needs a device stays with the stand-in."""
    library = Library("foo", "0", ("foo.h",), forwards=True)
    assert 'emu_real_cudnn("fooGetErrorString")' in definition("fooGetErrorString", library)
    header = HEADER.replace("fooHandle_t", "cudnnHandle_t")
    (line,) = [row for row in generate(library, header, (), ()).splitlines() if " fooDestroy(" in row]
    assert "emu_real_cudnn" not in line
