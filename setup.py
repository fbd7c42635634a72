from setuptools import find_packages, setup

setup(name="roll", version="0.1.0", packages=find_packages(include=["roll", "roll.*"]), python_requires=">=3.11")
