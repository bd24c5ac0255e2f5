# What the Makefiles of the chapters' cpp/ folders share: each of `programs` from the .cpp files it depends on.
query := import scipy_openblas32 as b, sysconfig as s; print(b.get_lib_dir(), s.get_path("stdlib"))
found := $(shell python -c '$(query)')
blas := $(word 1,$(found))
flags := -std=c++20 -O3 -march=native -fno-math-errno -fopenmp-simd -I../../cpp/include -DFIVED_BLAS_PREFIX=scipy_ \
  -DFIVED_TEXT_FOLDER='"$(word 2,$(found))"'

.DEFAULT_GOAL := all
all: $(programs)
$(programs): $(wildcard *.hpp ../../cpp/include/fived/*.hpp ../../cpp/include/fived/*/*.hpp)
	mpicxx $(flags) $(filter %.cpp,$^) -o $@ -L$(blas) -Wl,-rpath,$(blas) -lscipy_openblas
clean:
	rm -f $(programs)
.PHONY: all clean
